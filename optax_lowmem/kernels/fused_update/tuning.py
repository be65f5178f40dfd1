"""How a kernel's work is cut: what the caller says, else what was tuned here, else a heuristic."""

import dataclasses
import functools
import json
from importlib import resources
from typing import Any

import jax

from optax_lowmem.kernels.tiles import Tile


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The free choices of a fused step.

    Attributes:
      tile: what a program of a kernel takes.
      leaves: most leaves that share a launch; each adds a branch and some pointers.
      elements: no leaf joins a launch that would then have more; a launch needs all its gradients
        at once, so this bounds what sharing costs in memory.
    """

    tile: Tile = Tile()
    leaves: int = 16
    elements: int = 1 << 25


HEURISTIC = Tuning()


@functools.cache
def _tuned() -> dict[str, Any]:
    text = resources.files(__package__).joinpath("tuned.json").read_text(encoding="utf-8")
    return json.loads(text)


def parse(entry: dict[str, int]) -> Tuning:
    """A line of tuned.json."""
    tile = Tile(entry["tile_elements"], entry["warps"])
    return Tuning(tile, entry["leaves"], entry["elements"])


def resolve(argument: Tuning | None, backend: str, slots: int) -> Tuning:
    """Argument, else the tuned entry of this device, else the heuristic.

    Args:
      argument: the caller's choice.
      backend: `pallas` or `triton`.
      slots: how many slots the optimizer has.
    """
    if argument is not None:
        return argument
    devices = _tuned().get(jax.local_devices()[0].device_kind, {})
    entry = devices.get(f"{backend}/{slots}-slots")
    return HEURISTIC if entry is None else parse(entry)
