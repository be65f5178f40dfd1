"""Selection of a transformer's matrices by part: `od`, `out`, `down`, `up`, `qkv` or `all`."""

import fnmatch
from collections.abc import Callable, Sequence
from typing import Any

from optax_lowmem._src.arrays.roles.roles import (
    BIASES,
    EMBEDDING,
    FUSED,
    HEAD,
    KEY,
    OUT,
    QUERY,
    VALUE,
    ModuleLeaf,
    is_embedding,
    is_norm,
    words,
)
from optax_lowmem._src.arrays.typing import Shaped

# module names in lower case, without Linen's number
_UP = {"up", "up_proj", "gate", "gate_proj", "w1", "w3", "wi", "w_up", "w_gate", "fc1", "fc_in",
       "c_fc", "dense_h_to_4h"}  # fmt: skip
_DOWN = {"down", "down_proj", "w2", "wo", "w_down", "fc2", "fc_out", "c_proj", "dense_4h_to_h"}
_ONLY_IN_ATTENTION = {"proj", "dense", "output"}  # names in OUT that other modules have too
_MATRICES = ("kernel", "w", "weight")

Parts = str | Sequence[str] | Callable[[str, Any], bool]


def _is_out(leaf: ModuleLeaf) -> bool:
    if leaf.module not in OUT:
        return False
    if leaf.module in _ONLY_IN_ATTENTION:
        return leaf.directly_in_attention
    return leaf.in_attention or leaf.module not in _DOWN


def _is_down(leaf: ModuleLeaf) -> bool:
    return leaf.module in _DOWN and not leaf.in_attention


def _is_qkv(leaf: ModuleLeaf) -> bool:
    return leaf.module in QUERY | KEY | VALUE | FUSED


def _is_up(leaf: ModuleLeaf) -> bool:
    return leaf.module in _UP


def _is_any(leaf: ModuleLeaf) -> bool:
    if leaf.array in BIASES or is_norm(leaf) or is_embedding(leaf) or "conv" in words(leaf.module):
        return False
    if leaf.module in EMBEDDING or (leaf.module in HEAD and not leaf.in_attention):
        return False
    known = _is_out(leaf) or _is_down(leaf) or _is_qkv(leaf) or _is_up(leaf)
    return known or leaf.array in _MATRICES


PARTS: dict[str, Callable[[ModuleLeaf], bool]] = {
    "od": lambda leaf: _is_out(leaf) or _is_down(leaf),
    "out": _is_out,
    "down": _is_down,
    "up": _is_up,
    "qkv": _is_qkv,
    "all": _is_any,
}


def chooser(parts: Parts) -> Callable[[str, Any], bool]:
    """Return a function (path, leaf) -> whether the leaf belongs to these parts.

    Args:
      parts: `od` (attention output projection and last matrix of an MLP), `out`, `down`, `up`,
        `qkv`, `all` (every matrix except embeddings and the output head), or a glob pattern on
        paths; a sequence of these; or a function of (path, leaf).

    Raises:
      TypeError: for anything else.
    """
    if callable(parts):
        return parts
    names = (parts,) if isinstance(parts, str) else tuple(parts)
    if not names or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"parts must be names ({', '.join(PARTS)}), patterns or a function, got {parts!r}"
        )

    def chosen(path: str, leaf: Shaped) -> bool:
        shape = tuple(getattr(leaf, "shape", (1, 1)))
        known = ModuleLeaf(path, shape)
        return any(
            PARTS[name](known) and known.array not in BIASES
            if name in PARTS
            else fnmatch.fnmatchcase(path, name)
            for name in names
        )

    return chosen
