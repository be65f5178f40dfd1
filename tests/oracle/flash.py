"""Algorithms 4, 5 and 6: the exact rules between a decoding prologue and an encoding epilogue."""

from __future__ import annotations

import dataclasses

import numpy as np

from . import codecs, scales, split
from .codecs import Array, Codec
from .optimizers import Rule, init_slots
from .optimizers import step as exact_step


@dataclasses.dataclass(frozen=True)
class Storage:
    """Storage settings of the oracle; the defaults are the safe forms, PAPER the published ones."""

    mu: Codec | None = codecs.softsign
    nu: Codec | None = codecs.sqrt
    group_size: int = 32
    mu_scale: str = "e8m8"
    nu_scale: str = "f32"
    codes_by: str = "stored"
    rounding: str = "half_away"
    nu_floor: bool = True
    split: str = "bits"  # or "ulp"
    bits: int | None = 24  # None: a float32 weight and no correction
    dtype: str = "bfloat16"


PAPER = Storage(mu_scale="fp16", nu_scale="fp16", codes_by="exact", nu_floor=False, split="ulp")


@dataclasses.dataclass(frozen=True)
class State:
    """slots: name -> (codes in the parameter's shape, scales), or (float32 moments, None)."""

    weight: Array
    correction: Array | None
    slots: dict[str, tuple[Array, Array | None]]


def split_weight(theta: Array, storage: Storage) -> tuple[Array, Array | None]:
    theta = np.asarray(theta, np.float32)
    if storage.bits is None:
        return theta, None
    if storage.split == "bits":
        return split.split_bits(theta, storage.bits)
    return split.split_ulp(theta, storage.dtype, storage.bits)


def master_weight(state: State, storage: Storage) -> Array:
    if storage.bits is None:
        return state.weight
    if storage.split == "bits":
        return split.join_bits(state.weight, state.correction, storage.bits)
    return split.join_ulp(state.weight, state.correction, storage.dtype, storage.bits)


def encode_slot(name: str, x: Array, storage: Storage, noise: Array | None = None):
    """(codes, scales) of one moment; noise: uniforms in [0, 1) of x's shape."""
    codec = getattr(storage, name)
    if codec is None:
        return np.asarray(x, np.float32), None
    return scales.encode_array(
        codec,
        x,
        storage.group_size,
        scale=getattr(storage, name + "_scale"),
        codes_by=storage.codes_by,
        rounding=storage.rounding,
        noise=noise,
        floor=storage.nu_floor and not codec.signed,
    )


def decode_slot(name: str, stored: tuple[Array, Array | None], storage: Storage) -> Array:
    codes, scale = stored
    if scale is None:
        return codes.astype(np.float64)
    return scales.decode_array(getattr(storage, name), codes, scale, storage.group_size)


def init(rule: Rule, theta: Array, storage: Storage = PAPER) -> State:
    """Lines 1 to 3: zero moments through the codecs, the weight through the split."""
    slots = {
        name: encode_slot(name, zero, storage) for name, zero in init_slots(rule, theta).items()
    }
    return State(*split_weight(theta, storage), slots)


def step(
    rule: Rule,
    state: State,
    g: Array,
    t: int,
    storage: Storage = PAPER,
    noise: dict[str, Array] | None = None,
    **hyper,
) -> State:
    """One quantized step; `hyper` as for `optimizers.step`, noise per slot for stochastic codes."""
    moments = {name: decode_slot(name, stored, storage) for name, stored in state.slots.items()}
    theta, moments = exact_step(rule, master_weight(state, storage), moments, g, t, **hyper)
    noise = noise or {}
    slots = {name: encode_slot(name, x, storage, noise.get(name)) for name, x in moments.items()}
    return State(*split_weight(theta, storage), slots)
