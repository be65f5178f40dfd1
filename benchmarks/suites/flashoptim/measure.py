"""Measurements for the figures: errors of reconstruction and of quantized states, closed loops.

Truth is NumPy in float64; the library's codecs do the rest, as they would while training.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_lowmem import codecs

# ---- Figure 3: an f32 weight through a 16-bit one and its correction ---------------------------

EXPONENTS = np.arange(-149, 128)  # floor(log2 w) of every finite f32; below -126 they are denormal
NORMAL = {"bf16": (-126, 127), "fp16": (-14, 15)}
LARGEST_FP16 = 65504.0
DTYPES = {"bf16": jnp.bfloat16, "fp16": jnp.float16}


def weights_of_exponent(exponent: int, samples: int) -> np.ndarray:
    """Positive f32 values in [2^exponent, 2^(exponent + 1)), mantissas spread evenly."""
    mantissa_bits = min(23, exponent + 149)
    count = min(samples, 2**mantissa_bits)
    mantissa = np.arange(count, dtype=np.uint64) * 2654435761 % 2**mantissa_bits
    if exponent < -126:
        bits = (1 << mantissa_bits) + mantissa
    else:
        bits = ((exponent + 127) << 23) + mantissa
    return bits.astype(np.uint32).view(np.float32)


def _through_split(split: codecs.MasterSplit, dtype: Any) -> Callable[[np.ndarray], np.ndarray]:
    there = jax.jit(lambda w: split.split(w, dtype))
    back = jax.jit(split.join)
    return lambda w: np.asarray(back(*there(w)))


def _uncorrected(dtype: Any, w: np.ndarray) -> np.ndarray:
    return w.astype(dtype).astype(np.float32)


def _float_error(dtype: Any, w: np.ndarray) -> np.ndarray:
    """The rounding error kept in the same 16-bit float (Zamirai et al.'s Kahan buffer)."""
    weight = w.astype(dtype).astype(np.float32)
    return weight + (w - weight).astype(dtype).astype(np.float32)


def schemes(target: str) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    """Every way to keep f32 weights beside bf16 or fp16 ones, as a function w -> rebuilt w."""
    dtype = DTYPES[target]
    names = ["ulp-24", "ulp-32"] + (["bits-24", "bits-32"] if target == "bf16" else [])
    plain = {"none": partial(_uncorrected, dtype), "float": partial(_float_error, dtype)}
    return plain | {name: _through_split(codecs.SPLITS[name], dtype) for name in names}


def reconstruction_error(target: str, samples: int) -> dict[str, np.ndarray]:
    """Mean |rebuilt - w| / w for each scheme and exponent; NaN where the target overflows."""
    binades = [weights_of_exponent(int(e), samples) for e in EXPONENTS]
    largest = LARGEST_FP16 if target == "fp16" else float(jnp.finfo(jnp.bfloat16).max)
    blocks = [w[w <= largest] for w in binades]
    ends = np.cumsum([len(w) for w in blocks])[:-1]
    weights = np.concatenate(blocks)
    result = {}
    with np.errstate(under="ignore"):
        for name, rebuild in schemes(target).items():
            exact = weights.astype(np.float64)
            error = np.abs(rebuild(weights).astype(np.float64) - exact) / exact
            parts = np.split(error, ends)
            result[name] = np.array([e.mean() if len(e) else np.nan for e in parts])
    return result


def normal_range(target: str) -> np.ndarray:
    """Return the mask of EXPONENTS that are normal in the 16-bit format."""
    low, high = NORMAL[target]
    return (low <= EXPONENTS) & (high >= EXPONENTS)


BY_SIDE = "ulp-32, bound by side"


def _ulp_by_side(w: np.ndarray) -> np.ndarray:
    """Positive weights through Algorithm 1 with the bound of the side on which the error lies.

    Under a power of two a bf16 is half as far away, so the bound is half as large there.
    """
    weight = w.astype(jnp.bfloat16).astype(np.float32)
    error, (mantissa, exponent) = w - weight, np.frexp(weight)
    bound = np.ldexp(np.float32(1), exponent - 9)  # ULP / 2
    bound = np.where((mantissa == 0.5) & (error < 0), bound / 2, bound)
    top = np.float32(2**15 - 1)
    return weight + np.round(error / bound * top) * (1 / top) * bound


def exact_share(name: str, samples: int, lowest: int = -100) -> float:
    """Share of f32 values from 2^lowest to 2^127 that a bf16 scheme returns bit for bit."""
    binades = [weights_of_exponent(e, samples) for e in range(lowest, 127)]
    weights = np.concatenate(binades)
    rebuild = (schemes("bf16") | {BY_SIDE: _ulp_by_side})[name]
    return float((rebuild(weights) == weights).mean())


# ---- Figure 4: moments of a real run through a codec ------------------------------------------

GROUP, EPS = 32, 1e-8
MOMENTS = {
    "m": {
        "linear, paper": codecs.linear_paper(),
        "companded, paper": codecs.softsign_paper(),
        "linear, ours": codecs.linear(),
        "companded, ours": codecs.softsign(),
    },
    "v": {
        "linear, paper": codecs.linear_paper(signed=False),
        "companded, paper": codecs.sqrt_paper(),
        "linear, ours": codecs.linear(signed=False),
        "companded, ours": codecs.sqrt(),
    },
}


@partial(jax.jit, static_argnames="codec")
def stored(codec: codecs.GroupCodec, x: jax.Array) -> jax.Array:
    """Encode and decode a group view [..., groups, 32], rounded to nearest."""
    return codec.decode(*codec.encode(x))


def _groups(tensors: list[jax.Array]) -> np.ndarray:
    """All tensors as [groups, 32]; their last axes are multiples of 32."""
    return np.concatenate([np.reshape(x, (-1, GROUP)) for x in tensors])


class StateErrors:
    """Collects the NMSE of the moments in an optax state: sum (stored - x)^2 / sum x^2.

    Call it with (step, state); `values[slot][codec]` then has one number per tensor and step. Slot
    "u" is Adam's direction m / (sqrt(v) + eps) with only v stored.
    """

    FIELDS = {"mu": "m", "trace": "m", "nu": "v"}

    def __init__(self, every: int):
        self.every = every
        self.values: dict[str, dict[str, list[float]]] = {}

    def __call__(self, step: int, state: Any) -> None:
        if step % self.every:
            return
        moments = self._moments(state)
        for slot, tensors in moments.items():
            starts = np.cumsum([0] + [x.size // GROUP for x in tensors])[:-1]
            x = _groups(tensors)
            for name, codec in MOMENTS[slot].items():
                kept = np.asarray(stored(codec, x), np.float64)
                self._add(slot, name, x.astype(np.float64), kept, starts)
                if slot == "v":
                    m = _groups(moments["m"]).astype(np.float64)
                    self._add("u", name, m / (np.sqrt(x) + EPS), m / (np.sqrt(kept) + EPS), starts)

    def _moments(self, state: Any) -> dict[str, list[jax.Array]]:
        parts = jax.tree.leaves(state, is_leaf=lambda s: hasattr(s, "_fields"))
        return {
            slot: jax.tree.leaves(getattr(part, field))
            for part in parts
            for field, slot in self.FIELDS.items()
            if hasattr(part, field)
        }

    def _add(self, slot: str, name: str, x: np.ndarray, kept: np.ndarray, starts: Any) -> None:
        def sums(y: np.ndarray) -> np.ndarray:
            return np.add.reduceat(np.square(y).sum(axis=1), starts)

        power = sums(x)
        values = (sums(kept - x) / np.where(power > 0, power, np.nan)).tolist()
        column = self.values.setdefault(slot, {}).setdefault(name, [])
        column += [value for value in values if np.isfinite(value)]


# ---- The closed loop: decode, update, encode, thousands of times ------------------------------


VARIANCE_STORAGES = {  # codec of v and whether its codes are rounded stochastically
    "FP16 scale, nearest (paper)": (codecs.sqrt_paper(), False),
    "16-bit e8m8 scale, nearest": (
        dataclasses.replace(codecs.sqrt(), scale=codecs.softsign().scale),
        False,
    ),
    "f32 scale, nearest": (codecs.sqrt(), False),
    "f32 scale, stochastic (default)": (codecs.sqrt(), True),
}
CASES = {  # and how many steps each one takes
    "constant gradient": 6000,
    "gradients x 0.1 at step 3000": 9000,
    "one element of 32 x 0.1 at step 3000": 9000,
}
CHANGE, EVERY = 3000, 50


def _gradients(
    case: str, key: jax.Array, base: jax.Array, spread: jax.Array, t: jax.Array
) -> jax.Array:
    if case == "constant gradient":
        return jnp.broadcast_to(base, spread.shape)
    g = base * spread * jax.random.normal(jax.random.fold_in(key, t), spread.shape)
    shrunk = g * 0.1 if case.startswith("gradients") else g.at[:, 0].multiply(0.1)
    return jnp.where(t >= CHANGE, shrunk, g)


def _next_v(name: str, stored: Any, g2: jax.Array, noise: jax.Array) -> Any:
    codec, stochastic = VARIANCE_STORAGES[name]
    v = 0.999 * codec.decode(*stored) + 0.001 * g2
    return codec.encode(v, noise if stochastic else None)


@partial(jax.jit, static_argnames=("case", "groups"))
def variance_ratio(case: str, groups: int) -> dict[str, jax.Array]:
    """Median of sqrt(v stored / v true) every EVERY steps for each storage, beta2 = 0.999.

    Normal gradients whose scales are log-normal (sigma 1) inside a group of 32 and spread over four
    octaves between groups; in the last case only the element that changes counts.
    """
    key, key_base, key_spread, key_noise = jax.random.split(jax.random.key(0), 4)
    base = 2.0 ** jax.random.uniform(key_base, (groups, 1), minval=-12, maxval=-8)
    spread = jnp.exp(jax.random.normal(key_spread, (groups, GROUP)))

    def step(carry: Any, t: jax.Array) -> tuple[Any, None]:
        stored, true = carry
        g2 = jnp.square(_gradients(case, key, base, spread, t))
        noise = jax.random.uniform(jax.random.fold_in(key_noise, t), spread.shape)
        stored = {name: _next_v(name, stored[name], g2, noise) for name in stored}
        return (stored, 0.999 * true + 0.001 * g2), None

    def record(carry: Any, start: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        carry, _ = jax.lax.scan(step, carry, start + jnp.arange(EVERY))
        watched = slice(0, 1) if case.startswith("one") else slice(None)

        def median(name: str) -> jax.Array:
            v = VARIANCE_STORAGES[name][0].decode(*carry[0][name])
            return jnp.median(jnp.sqrt(v / carry[1])[:, watched])

        return carry, {name: median(name) for name in VARIANCE_STORAGES}

    zeros = jnp.zeros_like(spread)
    stored = {name: codec.encode(zeros) for name, (codec, _) in VARIANCE_STORAGES.items()}
    return jax.lax.scan(record, (stored, zeros), jnp.arange(0, CASES[case], EVERY))[1]


def closed_loop(groups: int) -> dict[str, dict[str, np.ndarray]]:
    """`variance_ratio` of every case."""
    curves = {case: jax.device_get(variance_ratio(case, groups)) for case in CASES}
    return {case: {name: curves[case][name] for name in VARIANCE_STORAGES} for case in CASES}
