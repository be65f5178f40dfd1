"""Tuning of a kernel: the caller's, else the tuned entry of the device, else a heuristic."""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from importlib import resources
from typing import Any

import jax

from optax_lowmem._src.core.groups import Tile


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The free choices of a fused step.

    Attributes:
      tile: what a program of a kernel takes.
      leaves: most leaves that share a launch; each adds a copy of the step to a Pallas kernel.
        Eight make a step of Llama-3.2-1B on an H200 0.4 % faster, and compile 28 % longer.
      elements: no leaf joins a launch that would then have more; a launch needs all its gradients
        at once, so this bounds what sharing costs in memory.
    """

    tile: Tile = Tile()
    leaves: int = 4
    elements: int = 1 << 25


HEURISTIC = Tuning()
# Of groups of so many lanes the random bits of rows change hands between the threads of 4 warps:
# 12 to 29 instructions an element of sm_90 that 8 warps do not have.
_WIDE = 128
HEURISTIC_WIDE = Tuning(Tile(2048, 8))
_LEAVES_OF_TRITON = 8  # a generated kernel has one copy of the step for all leaves of a launch
# what a core's memory holds twice of AdamW's operands; the kernel takes less of wider ones
HEURISTIC_TPU = Tuning(Tile(1 << 19))
_trial: ContextVar[Tuning | None] = ContextVar("trial", default=None)


@contextlib.contextmanager
def trying(tuned: Tuning | None) -> Iterator[None]:
    """Steps that are traced inside are cut like this, unless they say otherwise: for a tuner."""
    token = _trial.set(tuned)
    try:
        yield
    finally:
        _trial.reset(token)


@functools.cache
def _tuned() -> dict[str, Any]:
    text = resources.files(__package__).joinpath("tuned.json").read_text(encoding="utf-8")
    return json.loads(text)


def parse(line: Mapping[str, Any]) -> Tuning:
    """A line of tuned.json, whose `source` says where it comes from."""
    return Tuning(Tile(line["tile_elements"], line["warps"]), line["leaves"], line["elements"])


def entry(tuned: Tuning) -> dict[str, int]:
    """Return what `parse` reads of a line of tuned.json."""
    return {
        "tile_elements": tuned.tile.elements,
        "warps": tuned.tile.warps,
        "leaves": tuned.leaves,
        "elements": tuned.elements,
    }


def key(backend: str, slots: int, group_size: int) -> str:
    """Return the key in tuned.json of a kernel, a number of slots, and narrow or wide groups."""
    return f"{backend}/{slots}-slots" + ("/wide" if group_size >= _WIDE else "")


def heuristic(backend: str, group_size: int) -> Tuning:
    """Return the tuning where none is known of a device; the arguments are those of `resolve`."""
    if backend == "pallas_tpu":
        return HEURISTIC_TPU
    found = HEURISTIC_WIDE if group_size >= _WIDE else HEURISTIC
    return dataclasses.replace(found, leaves=_LEAVES_OF_TRITON) if backend == "triton" else found


def resolve(argument: Tuning | None, backend: str, slots: int, group_size: int) -> Tuning:
    """Argument (or trial), else the tuned entry of this device, else the heuristic.

    Args:
      argument: the caller's choice.
      backend: `pallas`, `triton` or `pallas_tpu`.
      slots: how many slots the optimizer has.
      group_size: of its codes.
    """
    chosen = argument or _trial.get()
    if chosen is not None:
        return chosen
    devices = _tuned().get(jax.local_devices()[0].device_kind, {})
    line = devices.get(key(backend, slots, group_size))
    if line is not None:
        return parse(line)
    return heuristic(backend, group_size)
