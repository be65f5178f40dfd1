"""Tile and launch sizes: the caller's, else those tuned for the device, else a heuristic."""

import dataclasses
import functools
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

import jax

from optax_lowmem._src.arrays.groups import Tile
from optax_lowmem._src.kernels import step_arguments


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Parameters of a fused step that affect speed but not results."""

    tile: Tile = Tile()  # of one program
    # maximum number of leaves per launch; each adds a copy of the step to a Pallas kernel. Eight
    # make a step of Llama-3.2-1B on an H200 0.4 % faster, but take 28 % longer to compile
    leaves: int = 4
    # maximum number of elements of a launch with several leaves; a launch needs all its gradients
    # at once, so this bounds the additional memory
    elements: int = 1 << 25


HEURISTIC = Tuning()
# With groups of at least this many lanes, 4 warps exchange the random bits of rows between threads:
# 12 to 29 instructions per element on sm_90 that 8 warps do not need.
_WIDE = 128
HEURISTIC_WIDE = Tuning(Tile(2048, 8))
_LEAVES_OF_TRITON = 8  # a generated kernel has one copy of the step for all leaves
# fits AdamW's operands in VMEM twice; the kernel reduces it for wider operands
HEURISTIC_TPU = Tuning(Tile(1 << 19))


@functools.cache
def _tuned() -> dict[str, Any]:
    text = resources.files(__package__).joinpath("tuned.json").read_text(encoding="utf-8")
    return json.loads(text)


def parse(line: Mapping[str, int]) -> Tuning:
    """Parse an entry of tuned.json."""
    return Tuning(Tile(line["tile_elements"], line["warps"]), line["leaves"], line["elements"])


def entry(tuned: Tuning) -> dict[str, int]:
    """Return a tuning as an entry of tuned.json; the inverse of `parse`."""
    return {
        "tile_elements": tuned.tile.elements,
        "warps": tuned.tile.warps,
        "leaves": tuned.leaves,
        "elements": tuned.elements,
    }


def key(backend: str, slots: int, group_size: int) -> str:
    """Return the key of an entry in tuned.json."""
    return f"{backend}/{slots}-slots" + ("/wide" if group_size >= _WIDE else "")


def heuristic(backend: str, group_size: int) -> Tuning:
    """Return the tuning for devices without an entry; arguments as in `resolve`."""
    if backend == "pallas_tpu":
        return HEURISTIC_TPU
    result = HEURISTIC_WIDE if group_size >= _WIDE else HEURISTIC
    return dataclasses.replace(result, leaves=_LEAVES_OF_TRITON) if backend == "triton" else result


def resolve(argument: Tuning | None, backend: str, slots: int, group_size: int) -> Tuning:
    """Return the argument, or that of `stepping`, else the device's entry or the heuristic."""
    chosen = argument or step_arguments.current().tuning
    if chosen is not None:
        return chosen
    devices = _tuned().get(jax.local_devices()[0].device_kind, {})
    line = devices.get(key(backend, slots, group_size))
    if line is not None:
        return parse(line)
    return heuristic(backend, group_size)
