"""Errors of m / sqrt(v) from stored moments, and what a whole state's groups span."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.suites.formats.formats import MU, NU, PAPER_GROUP, Copy
from optax_lowmem import codecs
from optax_lowmem._src.core import groups

EPS = 1e-8  # Adam's, outside the root


@dataclasses.dataclass(frozen=True)
class Correction:
    """Bias corrections of stored moments in Adam's step, mhat / (sqrt(vhat) + eps)."""

    mu: float
    nu: float

    @staticmethod
    def after(step: int, decays: Mapping[str, float]) -> Correction:
        return Correction(*(1 / (1 - decays[slot] ** step) for slot in (MU, NU)))

    def first(self, mu: np.ndarray) -> np.ndarray:
        return np.float64(mu) * self.mu

    def second(self, nu: np.ndarray) -> np.ndarray:
        return 1 / (np.sqrt(np.maximum(np.float64(nu), 0) * self.nu) + EPS)


@dataclasses.dataclass(frozen=True)
class Errors:
    """Errors of the step for each pair of a way to store m and one to store v."""

    mus: tuple[Copy, ...]  # the copies
    nus: tuple[Copy, ...]
    mse: np.ndarray  # [leaves, mus, nus], mean square over the sample of a leaf
    signal: np.ndarray  # [leaves], mean square of the f32 step
    sizes: np.ndarray  # [leaves], elements of the whole leaf

    @property
    def of_model(self) -> np.ndarray:
        """[mus, nus]: MSE over all elements of the model, as the paper's tables have it."""
        return np.einsum("l,lij->ij", self.sizes / self.sizes.sum(), self.mse)

    @property
    def median(self) -> np.ndarray:
        """[mus, nus]: the median over leaves of MSE / mean square of the step."""
        return np.median(self.mse / self.signal[:, None, None], axis=0)

    def at(self, mu: Copy, nu: Copy) -> tuple[float, float]:
        """MSE of the model and median NMSE of one pair."""
        i, j = self.mus.index(mu), self.nus.index(nu)
        return float(self.of_model[i, j]), float(self.median[i, j])

    def select(self, mus: Sequence[Copy], nus: Sequence[Copy]) -> Errors:
        rows, columns = ([have.index(c) for c in want]
                         for have, want in ((self.mus, mus), (self.nus, nus)))  # fmt: skip
        part = self.mse[:, rows][:, :, columns]
        return dataclasses.replace(self, mus=tuple(mus), nus=tuple(nus), mse=part)


def errors(
    true: Mapping[str, np.ndarray],
    values: Mapping[Copy, np.ndarray],
    leaf_of_chunk: np.ndarray,
    sizes: Sequence[int],
    correction: Correction,
) -> Errors:
    """Of every pair of stored values [chunks, length].

    sum (a r - t)^2 = sum a^2 r^2 - 2 sum a r t + sum t^2 over elements: products of matrices, of
    all pairs at once. float64 leaves 1e-14 of the step's square, far below any 8-bit error.
    """
    mus, nus = (tuple(c for c in values if c.slot == slot) for slot in (MU, NU))
    mse, signal = [], []
    for leaf in range(len(sizes)):
        own = leaf_of_chunk == leaf
        a = np.stack([correction.first(values[c][own]).ravel() for c in mus])
        r = np.stack([correction.second(values[c][own]).ravel() for c in nus])
        t = (correction.first(true[MU][own]) * correction.second(true[NU][own])).ravel()
        square = np.mean(t * t)
        products = (a * a) @ (r * r).T - 2 * (a * t) @ r.T
        mse.append(np.maximum(products / t.size + square, 0))
        signal.append(square)
    return Errors(mus, nus, np.stack(mse), np.array(signal), np.array(sizes, np.float64))


def encoded_once(true: Mapping[str, np.ndarray], copies: Sequence[Copy]) -> dict[Copy, np.ndarray]:
    """Values of the f32 moments after one encoding to nearest."""
    return dict(zip(copies, jax.device_get(_round_trips(tuple(copies), dict(true))), strict=True))


@functools.partial(jax.jit, static_argnums=0)
def _round_trips(copies: tuple[Copy, ...], true: dict[str, jax.Array]) -> list[jax.Array]:
    return [
        codecs.decode_array(c.codec, *codecs.encode_array(c.codec, true[c.slot], c.group), c.group)
        for c in copies
    ]


DECADES = np.linspace(0, 16, 161)  # edges of log10(max / min) of a group
EXPONENTS = np.linspace(-1, 3, 161)  # edges of log10(k)
FORMAT_RANGE = 1 / codecs.e4m3().smallest  # E4M3's, 229376


def spans(x: np.ndarray, group: int = PAPER_GROUP) -> np.ndarray:
    """log10(max / min) over what is not 0, for each group with two or more of such."""
    view = np.abs(np.asarray(groups.to_groups(jnp.asarray(x), group))).reshape(-1, group)
    live = view > 0
    view = view[live.sum(-1) > 1]
    least = np.min(np.where(view > 0, view, np.inf), axis=-1)
    return np.log10(view.max(-1)) - np.log10(least)


def histograms(spans_of_slot: np.ndarray) -> dict[str, np.ndarray]:
    """Counts of groups by span and by k = log(R_format) / log(R)."""
    wide = np.maximum(spans_of_slot, 1e-6)
    k = math.log10(FORMAT_RANGE) / wide
    return {
        "span": np.histogram(np.clip(spans_of_slot, *DECADES[[0, -1]]), DECADES)[0],
        "k": np.histogram(np.clip(np.log10(k), *EXPONENTS[[0, -1]]), EXPONENTS)[0],
    }


# Codecs of v with their groups, and whether a code may be 0 where v is not.
FLOORS: dict[str, tuple[Any, int, bool]] = {
    "sqrt, paper": (codecs.sqrt_paper(), 32, False),
    "sqrt, no floor": (codecs.sqrt(), 32, True),
    "sqrt": (codecs.sqrt(), 32, False),
    "E4M3, no floor": (codecs.e4m3(signed=False), 128, True),
    "E4M3": (codecs.e4m3(signed=False), 128, False),
    "DE8, no floor": (codecs.dynamic(signed=False), 128, True),
    "DE8": (codecs.dynamic(signed=False), 128, False),
    "E4M3 + expansion": (codecs.expanded_e4m3(signed=False), 128, False),
}


@jax.jit
def _floor_sums(mu: jax.Array, nu: jax.Array, correction: Any) -> dict[str, dict[str, jax.Array]]:
    return {name: _sums(*how, mu, nu, correction) for name, how in FLOORS.items()}


def _sums(
    codec: Any, group: int, cut: bool, mu: jax.Array, nu: jax.Array, correction: Any
) -> dict[str, jax.Array]:
    codes, scales = codecs.encode_array(codec, nu, group)
    decoded = codecs.decode_array(codec, codes, scales, group)
    if cut:  # 0 where the nearest code is 0
        _, divisor = codec.measure(groups.to_groups(nu, group))
        divisor = groups.spread_tree(divisor, nu.shape[-1], group)
        decoded = jnp.where(codec.position(codec.magnitude(nu), divisor) < 0.5, 0, decoded)

    def step(v: jax.Array) -> jax.Array:
        return mu * correction[0] / (jnp.sqrt(v * correction[1]) + EPS)

    lost = (nu > 0) & (decoded <= 0)
    hit = jnp.any(groups.to_groups(lost, group), axis=-1)
    error = (step(decoded) - step(nu)) ** 2
    return {
        "elements": jnp.sum(nu > 0, dtype=jnp.float32),
        "lost": jnp.sum(lost, dtype=jnp.float32),
        "groups": jnp.float32(hit.size),
        "groups_hit": jnp.sum(hit, dtype=jnp.float32),
        "error": jnp.sum(error),
        "error_elsewhere": jnp.sum(jnp.where(lost, 0, error)),
        "signal": jnp.sum(step(nu) ** 2),
        "largest": jnp.max(jnp.abs(step(decoded))),
        "largest_f32": jnp.max(jnp.abs(step(nu))),
    }


def floor_effect(
    moments: Sequence[tuple[jax.Array, jax.Array]], correction: Correction
) -> dict[str, dict[str, float]]:
    """Codec -> what one encoding of v, with m exact, does to the step over a whole state."""
    both = correction.mu, correction.nu
    leaves = [jax.device_get(_floor_sums(mu, nu, both)) for mu, nu in moments]

    def effect(name: str) -> dict[str, float]:
        def total(key: str) -> float:
            values = [float(leaf[name][key]) for leaf in leaves]
            return max(values) if key.startswith("largest") else sum(values)

        return {
            "lost_share": total("lost") / total("elements"),
            "groups_share": total("groups_hit") / total("groups"),
            "nmse": total("error") / total("signal"),
            "nmse_elsewhere": total("error_elsewhere") / total("signal"),
            "largest_step": total("largest"),
            "largest_step_f32": total("largest_f32"),
        }

    return {name: effect(name) for name in FLOORS}
