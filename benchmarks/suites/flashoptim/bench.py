"""FlashOptim's Figure 3 as numbers: f32 weights through a 16-bit one and its correction.

Its Figures 4 and 5 are of `pairs`. Truth is NumPy in float64.
"""

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import records
from optax_lowmem import codecs

EXPONENTS = np.arange(-149, 128)  # floor(log2 w) of every finite f32; below -126 they are denormal
NORMAL = {"bf16": (-126, 127), "fp16": (-14, 15)}
LARGEST_FP16 = 65504.0
DTYPES = {"bf16": jnp.bfloat16, "fp16": jnp.float16}
BY_SIDE = "ulp-32, bound by side"
LOWEST = -100  # below, the correction of a bf16 weight is a denormal f32, which devices flush


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


def schemes(target: str) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    """Every way to keep f32 weights beside bf16 or fp16 ones, as a function w -> rebuilt w."""
    dtype = DTYPES[target]

    def rounded(w: np.ndarray) -> np.ndarray:
        return w.astype(dtype).astype(np.float32)

    # the rounding error kept in the same 16-bit float (Zamirai et al.'s Kahan buffer)
    plain = {"none": rounded, "float": lambda w: rounded(w) + rounded(w - rounded(w))}
    names = ["ulp-24", "ulp-32"] + (["bits-24", "bits-32"] if target == "bf16" else [])
    return plain | {name: _through_split(codecs.SPLITS[name], dtype) for name in names}


def reconstruction_error(target: str, samples: int) -> dict[str, np.ndarray]:
    """Mean |rebuilt - w| / w for each scheme and exponent; NaN where the target overflows."""
    binades = [weights_of_exponent(int(e), samples) for e in EXPONENTS]
    largest = LARGEST_FP16 if target == "fp16" else float(jnp.finfo(jnp.bfloat16).max)
    blocks = [w[w <= largest] for w in binades]
    ends = np.cumsum([len(w) for w in blocks])[:-1]
    weights = np.concatenate(blocks)
    exact, result = weights.astype(np.float64), {}
    with np.errstate(under="ignore"):
        for name, rebuild in schemes(target).items():
            error = np.abs(rebuild(weights).astype(np.float64) - exact) / exact
            parts = np.split(error, ends)
            result[name] = np.array([e.mean() if len(e) else np.nan for e in parts])
    return result


def normal_range(target: str) -> np.ndarray:
    low, high = NORMAL[target]
    return (low <= EXPONENTS) & (high >= EXPONENTS)


def exact_share(name: str, samples: int) -> float:
    """Share of f32 values from 2^LOWEST to 2^127 that a bf16 scheme returns bit for bit."""
    weights = np.concatenate([weights_of_exponent(e, samples) for e in range(LOWEST, 127)])
    rebuild = (schemes("bf16") | {BY_SIDE: _ulp_by_side})[name]
    return float((rebuild(weights) == weights).mean())


@records.suite(samples={"type": int, "default": 2**16, "help": "f32 weights an exponent"})
def main(args: argparse.Namespace) -> Iterator[records.Rows]:
    """Yield the range over the normal exponents of the mean relative error of a rebuilt f32."""
    for target in DTYPES:
        normal = normal_range(target) & (EXPONENTS >= LOWEST)
        for name, errors in reconstruction_error(target, args.samples).items():
            within = errors[normal]
            values = {
                f"{end}_mean_relative_error": (float(value), "share")
                for end, value in (("min", within.min()), ("max", within.max()))
            }
            yield records.records_of("claims", f"split/{target}", name, values)
    for name in ("ulp-32", BY_SIDE, "bits-32"):
        share = {"exact_share": (exact_share(name, args.samples), "share")}
        yield records.records_of("claims", "split/bf16", name, share)
