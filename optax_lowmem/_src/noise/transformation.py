"""GaussWS as a transformation of an optimizer."""

from typing import Any

import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from optax_lowmem._src.core import trees
from optax_lowmem._src.core.hyperparameters import check_range
from optax_lowmem._src.noise import kernels
from optax_lowmem._src.noise.noisy import Noisy, Sampler
from optax_lowmem._src.noise.parts import Parts, chooser
from optax_lowmem._src.noise.sampling import noise_named


def gaussws_noise(
    inner: optax.GradientTransformation,
    parts: Parts = "all",
    *,
    bits_init: float = 6.0,
    bits_target: float = 4.0,
    bits_optimizer: optax.GradientTransformation | None = None,
    bits_loss: float = 0.0,
    noise: str = "gaussws",
    compute: str | None = None,
    clean_dtype: DTypeLike | None = None,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Trains on weights plus noise, \hat w = w + R max|w| 2^{1 - b_t} (GaussWS, equation 1).

    The parameters are \hat w, with new noise after every step; the state keeps w, which `inner`
    steps with the gradients of \hat w (equation 2). Blocks of 32 x 32 have a bitwidth each, b_t =
    b_{target} + b_i (b_{init} - b_{target}) (equation 9), and b_i the gradient of equation 3, for
    which R is made again. With noise of few bits weights learn to bear low precision, without the
    oscillations of straight-through estimates.

    It is outermost: the split of master weights, clipping and the like lie inside, and only what
    leaves its updates alone around it (`optax.MultiSteps`, `accumulate_gradients`,
    `track_master_ema`), or before it in a chain. Accumulation around it keeps the noise until the
    step.

    Args:
      inner: the whole optimizer.
      parts: the leaves with noise: `od` (an attention's projection and the last matrix of an MLP),
        `qkv`, `out`, `up`, `down`, `all` (every matrix but embeddings and the output head), or a
        glob pattern on paths; several of these; or a function (path, leaf) -> bool. Axes before the
        last two hold matrices of their own.
      bits_init: b_t at first, in bits.
      bits_target: what b_t is guided to.
      bits_optimizer: of b_i, from 1 at first; by default `optax.adamw(1e-3, weight_decay=0.1)`,
        whose decay is what guides. `optax.set_to_zero()` keeps b_t.
      bits_loss: lambda of the loss \lambda mean|b_t - b_{target}| (equation 10), whose gradient is
        added here.
      noise: `gaussws`; `diffq`, U(-0.5, 0.5); `box-muller`, a true rounded normal.
      compute: a format of a few bits that \hat w is rounded to, as of `gaussws.sample`; None: the
        parameters' dtype.
      clean_dtype: float32 keeps w in f32 beside 16-bit parameters, for an `inner` that does not
        split master weights; None: the parameters' dtype.
      seed: of the noise; `lowmem.init(..., seed=)` overrides it.

    Returns:
      An optax transformation. `lowmem.init` gives parameters with noise, `tx.init` alone none until
      the first step. `gaussws.clean_params(params, state)` has w for evaluation,
      `lowmem.master_params` in f32, `gaussws.bitwidths(state)` b_t.

    Raises:
      ValueError: where no leaf is of `parts`, or one is no matrix; for accumulation inside.

    Memory: of sampled leaves another weight, and 16 bytes per block of 1024 (with AdamW for b_i):
    2.02 bytes per 16-bit parameter.

    Numerics: through `optax.apply_updates` \hat w may be off by 2^-24 of what it was before;
    `lowmem.step` gives its very bits. The state knows w exactly either way.

    Deviation: noise is made of a hash of (seed, step, path, coordinates), whatever the sharding,
    instead of generators that are seeded one by another (section 3.7).

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> tx = lowmem.gaussws_noise(lowmem.flash_adamw(1e-3), parts="od")
      >>> params = {"mlp": {name: {"kernel": jnp.ones((64, 64))} for name in ("up", "down")}}
      >>> params, state = lowmem.init(tx, params)
      >>> noisy = {name: bool((w["kernel"] != 1).any()) for name, w in params["mlp"].items()}
      >>> noisy["up"], noisy["down"]
      (False, True)
      >>> params, state = lowmem.step(tx, params, state, params)

    References:
      Gaussian Weight Sampling for Scalable, Efficient and Stable Mixed-Precision QAT, 2025.
    """
    check_range("bits_loss", bits_loss, 0.0)
    if bits_optimizer is None:
        bits_optimizer = optax.adamw(1e-3, weight_decay=0.1)
    work = Noisy(
        inner=trees.wrapped(inner),
        parts=parts,
        bits_init=_bits("bits_init", bits_init),
        bits_target=_bits("bits_target", bits_target),
        bits_optimizer=trees.wrapped(bits_optimizer),
        bits_loss=bits_loss,
        noise=noise_named(noise),
        compute=_scaled(compute),
        clean_dtype=_clean_dtype(clean_dtype),
        seed=seed,
    )
    chooser(parts)
    sampler = Sampler(work.init, work.update)
    sampler.work = work
    return sampler


def _bits(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not -100 < value < 100:
        raise ValueError(f"{name} is a number of bits known when tracing, got {value!r}")
    return float(value)


def _scaled(compute: str | None) -> kernels.Scaled | None:
    found = None if compute is None else kernels.format_of(compute)
    if found is not None and not isinstance(found, kernels.Scaled):
        names = [n for n, f in kernels.FORMATS.items() if isinstance(f, kernels.Scaled)]
        raise ValueError(
            f"compute={compute!r}: parameters are kept in their own dtype; here it is one of "
            f"{', '.join(names)}, or None."
        )
    return found


def _clean_dtype(dtype: DTypeLike | None) -> Any:
    if dtype is None:
        return None
    if jnp.dtype(dtype) != jnp.float32:
        raise ValueError(f"clean_dtype is float32, or None for the parameters' own, got {dtype!r}")
    return jnp.dtype(jnp.float32)
