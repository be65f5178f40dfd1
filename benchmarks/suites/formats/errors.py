"""Errors of m / sqrt(v) from stored moments, and what a whole state's groups span."""

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.suites.formats.formats import EXACT, MU, NU, PAPER_GROUP, Copy, Pair
from optax_lowmem import codecs
from optax_lowmem._src.arrays import groups
from optax_lowmem._src.arrays.codecs import Layout

EPS = 1e-8  # Adam's, outside the root


def corrections(step: int, decays: Mapping[str, float]) -> tuple[float, float]:
    """Bias corrections of both moments in Adam's step, mhat / (sqrt(vhat) + eps)."""
    return 1 / (1 - decays[MU] ** step), 1 / (1 - decays[NU] ** step)


def errors(
    true: Mapping[str, np.ndarray],
    values: Mapping[Copy, np.ndarray],
    leaf_of_chunk: np.ndarray,
    sizes: Sequence[int],
    correction: tuple[float, float],
) -> dict[Pair, tuple[float, float]]:
    """Errors of the step for each pair of stored values [chunks, length] of m and of v.

    Its MSE over all elements of the model, as the paper's tables have it, and the median over
    leaves of MSE / mean square of the step. The f32 moments are one more way to store each slot.

    sum (a r - t)^2 = sum a^2 r^2 - 2 sum a r t + sum t^2 over elements: products of matrices, of
    all pairs at once. float64 leaves 1e-14 of the step's square, far below any 8-bit error.
    """
    values = {**values, **{copy: true[slot] for slot, copy in EXACT.items()}}
    mus, nus = (tuple(c for c in values if c.slot == slot) for slot in (MU, NU))
    mse, nmse = [], []
    for leaf in range(len(sizes)):
        own = {c: np.float64(x[leaf_of_chunk == leaf]).ravel() for c, x in values.items()}
        a = np.stack([own[c] * correction[0] for c in mus])
        r = np.stack([1 / (np.sqrt(np.maximum(own[c], 0) * correction[1]) + EPS) for c in nus])
        t = a[mus.index(EXACT[MU])] * r[nus.index(EXACT[NU])]
        square = np.mean(t * t)
        products = (a * a) @ (r * r).T - 2 * (a * t) @ r.T
        mse.append(np.maximum(products / t.size + square, 0))
        nmse.append(mse[-1] / square)
    both = np.average(mse, axis=0, weights=sizes), np.median(nmse, axis=0)
    pairs = itertools.product(mus, nus)
    return dict(zip(pairs, zip(*(x.ravel().tolist() for x in both), strict=True), strict=True))


@functools.partial(jax.jit, static_argnums=1)
def encoded_once(true: dict[str, jax.Array], copies: tuple[Copy, ...]) -> dict[Copy, jax.Array]:
    """Values of the f32 moments after one encoding to nearest."""
    coded = {c: codecs.encode_array(c.codec, true[c.slot], c.group) for c in copies}
    return {c: codecs.decode_array(c.codec, *own, c.group) for c, own in coded.items()}


def spans(x: np.ndarray, group: int = PAPER_GROUP) -> np.ndarray:
    """log10(max / min) over what is not 0, for each group with two or more of such."""
    view = np.abs(np.asarray(groups.to_groups(jnp.asarray(x), group))).reshape(-1, group)
    live = view > 0
    view = view[live.sum(-1) > 1]
    least = np.min(np.where(view > 0, view, np.inf), axis=-1)
    return np.log10(view.max(-1)) - np.log10(least)


# Codecs of v with their groups, and whether a code may be 0 where v is not.
FLOORS: dict[str, tuple[Any, int, bool]] = {
    "sqrt, no floor": (codecs.sqrt(), 32, True),
    "sqrt": (codecs.sqrt(), 32, False),
    "E4M3, no floor": (codecs.e4m3(signed=False), 128, True),
    "E4M3": (codecs.e4m3(signed=False), 128, False),
}


@jax.jit
def _floor_sums(
    mu: jax.Array, nu: jax.Array, correction: tuple[float, float]
) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Codec -> sums over a leaf, and the largest step."""

    def step(v: jax.Array) -> jax.Array:
        return mu * correction[0] / (jnp.sqrt(v * correction[1]) + EPS)

    def of(codec: Any, group: int, cut: bool) -> tuple[jax.Array, jax.Array]:
        codes, scales = codecs.encode_array(codec, nu, group)
        decoded = codecs.decode_array(codec, codes, scales, group)
        if cut:  # 0 where the nearest code is 0
            _, divisor = codec.measure(groups.to_groups(nu, group))
            divisor = Layout(group, nu.shape[-1]).to_elements(divisor)
            decoded = jnp.where(codec.position(codec.magnitude(nu), divisor) < 0.5, 0, decoded)
        lost = (nu > 0) & (decoded <= 0)
        sums = jnp.stack([jnp.sum(x, dtype=jnp.float32) for x in (lost, nu > 0)])
        return sums, jnp.max(jnp.abs(step(decoded)))

    return {name: of(*how) for name, how in FLOORS.items()}


def floor_effect(
    moments: Sequence[tuple[jax.Array, jax.Array]], correction: tuple[float, float]
) -> dict[str, dict[str, float]]:
    """Codec -> what one encoding of v, with m exact, does to the step over a whole state."""
    leaves = [jax.device_get(_floor_sums(*pair, correction)) for pair in moments]

    def effect(name: str) -> dict[str, float]:
        sums = np.sum([leaf[name][0] for leaf in leaves], axis=0, dtype=np.float64)
        lost, elements = map(float, sums)
        return {
            "lost_share": lost / elements,
            "largest_step": max(float(leaf[name][1]) for leaf in leaves),
        }

    return {name: effect(name) for name in FLOORS}
