"""Errors and spans of the stored states with the package's codecs."""

import jax.numpy as jnp
import numpy as np

from benchmarks.suites.formats import formats
from benchmarks.suites.formats.errors import Errors, encoded_once, spans
from benchmarks.suites.formats.formats import EXACT, MU, NEAREST, NU, PAPER_GROUP, STOCHASTIC, Copy
from benchmarks.suites.formats.states import States
from optax_lowmem import codecs

BINS = np.linspace(-6, 0, 49)  # log10 of a magnitude over its group's maximum


def exact(states: States) -> dict[Copy, np.ndarray]:
    """The f32 moments as copies."""
    return {copy: states.true[slot] for slot, copy in EXACT.items()}


def once(states: States, copies: list[Copy]) -> Errors:
    """The f32 moments, encoded once."""
    return states.errors(exact(states) | encoded_once(states.true, copies))


def closed(states: States) -> Errors:
    """Return the errors of the copies after training."""
    return states.errors(exact(states) | states.values())


def by_name(errors: Errors, values: np.ndarray) -> dict[tuple[str, str], float]:
    """(format of m, format of v) -> value."""
    return {
        (mu.format, nu.format): float(values[i, j])
        for i, mu in enumerate(errors.mus)
        for j, nu in enumerate(errors.nus)
    }


def at_equal_bytes(states: States) -> dict[str, dict[tuple[str, str], float]]:
    """Return a dict: way to store -> median NMSE of each pair of COAT's size, f32 among them."""
    budget, held, found = formats.BUDGETS[0], closed(states), {}
    for rounding in (NEAREST, STOCHASTIC):
        copies = [[EXACT[slot], *formats.column(slot, budget, rounding)] for slot in (MU, NU)]
        if rounding == NEAREST:
            new = [c for side in copies for c in side if c not in EXACT.values()]
            first = once(states, new).select(*copies)
            found["encoded once"] = by_name(first, first.median)
        part = held.select(*copies)
        found[f"closed loop, {rounding}"] = by_name(part, part.median)
    return found


def median_span(states: States, slot: str) -> float:
    """Median of log10(max / min) over groups, each leaf of the sample standing for all of it."""
    found, weights = [], []
    for leaf, size in enumerate(states.about["sizes"]):
        own = spans(states.true[slot][states.leaf_of_chunk == leaf])
        found.append(own)
        weights.append(np.full(len(own), size / len(own)))
    all_spans, all_weights = np.concatenate(found), np.concatenate(weights)
    order = np.argsort(all_spans)
    share = np.cumsum(all_weights[order]) / all_weights.sum()
    return float(all_spans[order][np.searchsorted(share, 0.5)])


def used_codes(codec: codecs.GroupCodec, x: np.ndarray) -> np.ndarray:
    """Share of the elements that are not 0 on each magnitude of a code."""
    codes, _ = codecs.encode_array(codec, jnp.asarray(x), PAPER_GROUP)
    counts = np.bincount(np.abs(np.int32(codes))[x != 0], minlength=codec.levels + 1)
    return counts / counts.sum()


def entropy(share: np.ndarray) -> float:
    """Bits of a distribution."""
    share = share[share > 0]
    return float(-np.sum(share * np.log2(share)))


def relative_error(codec: codecs.GroupCodec, x: np.ndarray) -> np.ndarray:
    """RMS relative error of the elements in each of BINS; NaN where there are few."""
    values = np.float64(
        codecs.decode_array(
            codec, *codecs.encode_array(codec, jnp.asarray(x), PAPER_GROUP), PAPER_GROUP
        )
    )
    most = np.abs(x).reshape(len(x), -1, PAPER_GROUP).max(-1)
    ratio = np.abs(x) / np.maximum(np.repeat(most, PAPER_GROUP, axis=-1), 1e-45)
    live = x != 0
    place = np.digitize(np.log10(ratio[live]), BINS[1:-1])
    square = ((values - x)[live] / x[live]) ** 2
    counts = np.bincount(place, minlength=len(BINS) - 1)
    sums = np.bincount(place, square, minlength=len(BINS) - 1)
    return np.where(counts >= 20, np.sqrt(sums / np.maximum(counts, 1)), np.nan)
