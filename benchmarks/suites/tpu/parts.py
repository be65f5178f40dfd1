"""The library's other programs: group codec, 8-bit products, FP8 activations, noise on weights."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

import optax_lowmem as lowmem
from benchmarks.peers.device_loop import live_bytes
from benchmarks.suites.linear import bench as linear
from benchmarks.suites.noise import bench as noise
from benchmarks.suites.tpu import cases
from optax_lowmem._src.codecs import group_codec
from optax_lowmem._src.noise import kernels as noise_kernels
from optax_lowmem._src.noise.distributions import NOISES
from optax_lowmem.layers import fp8_flow, switchback_dot_general

Part = tuple[Callable[..., Any], tuple[Any, ...]]  # with abstract arguments
_BF16, _F32 = (functools.partial(jax.ShapeDtypeStruct, dtype=x) for x in ("bfloat16", "float32"))
_KEY = jax.ShapeDtypeStruct((), jnp.uint32)
_CODECS = {codec.name: codec for codec in (lowmem.codecs.softsign(), lowmem.codecs.sqrt())}
PLAIN = "bf16"  # the standard layer, beside those in 8 bits


def _codec(impl: str, *shape: int) -> Part:
    """Encode or decode of one array, or an optax optimizer whose state is stored in 8 bits."""
    what, _, name = impl.partition("-")
    if what == "encode":
        encode = functools.partial(group_codec.encode, _CODECS[name], group_size=32)
        return lambda x, key: encode(x, key=key), (_F32(shape), _KEY)
    if what == "decode":
        decode = functools.partial(group_codec.decode, _CODECS[name], group_size=32)
        return decode, _CODECS[name].storage(shape, 32)
    mu, nu = _CODECS.values()
    tx, leaf = lowmem.compress_state(optax.scale_by_adam(), mu=mu, nu=nu), {"kernel": _F32(shape)}
    return (lambda grads, state: tx.update(grads, state)), (leaf, jax.eval_shape(tx.init, leaf))


def _linear(impl: str, tokens: int, width: int, out: int) -> Part:
    ours = impl.startswith("llm_int8")
    dot = switchback_dot_general(*impl.split("-")) if ours else linear.LAYERS[impl]
    return linear.linear(dot), (*map(_BF16, ((tokens, width), (width, out), (tokens, out))),)


def _flow(impl: str, tokens: int, width: int, hidden: int) -> Part:
    """Norm or gate, forward and backward, activations kept in FP8 and in bf16."""
    gate = _BF16((tokens, hidden))
    args = (_BF16((tokens, width)), _F32((width,))) if impl == "rms_norm" else (gate, gate)

    def value(*args: Any) -> jax.Array:
        return getattr(fp8_flow, impl)(*args).value

    def both(g: Any, *args: Any) -> Any:
        y, pull = jax.vjp(value, *args)
        return y, pull(g)

    return both, (jax.eval_shape(value, *args), *args)


def _noise(impl: str, *shape: int) -> Part:
    """Sampled weights, or what the gradient of the bitwidths takes of a gradient."""
    if impl == "sample":
        return noise.forward("gaussws"), (_F32(shape), _F32(noise_kernels.block_shape(shape)), _KEY)
    sums = functools.partial(noise_kernels.noise_sums, noise=NOISES["gaussws"])
    return sums, (_BF16(shape), _KEY)


_MAKERS = {"group_codec": _codec, "linear": _linear, "fp8_flow": _flow, "gaussws": _noise}
_CODED = (*(f"{what}-{name}" for name in _CODECS for what in ("encode", "decode")),
          "compress_state(adam)")  # fmt: skip
_LAYERS = (PLAIN, "switchback-int8", "switchback-fp8", "llm_int8-int8")
_FLOW = ("rms_norm", "gated_product")
# case -> implementations
PARTS: dict[str, tuple[str, ...]] = {
    "group_codec/2048x8192": _CODED,
    "group_codec/8192x8192": _CODED,  # in f32 larger than a chip's own memory
    "linear/16384x4096x16384": _LAYERS,
    "linear/8192x2048x8192": _LAYERS,
    "fp8_flow/8192x2048x8192": _FLOW,
    "fp8_flow/32768x4096x14336": _FLOW,
    "gaussws/2048x8192": ("sample", "noise_sums"),
}


def compile_part(chip: str, case: str, impl: str) -> tuple[Any, int]:
    """The program of a part for a chip, and bytes of arguments and results, each once."""
    kind, sizes = case.split("/")
    function, args = _MAKERS[kind](impl, *map(int, sizes.split("x")))
    ideal, on = live_bytes((args, jax.eval_shape(function, *args))), cases.mesh(chip)
    args = cases.placed(on, args, jax.tree.map(lambda _: PartitionSpec(), args))
    return cases.compiled(on, function, *args), ideal
