"""The library's other programs: group codec, 8-bit products, FP8 activations, noise on weights."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import optax_lowmem as lowmem
from benchmarks.suites.linear import bench as linear
from benchmarks.suites.noise import bench as noise
from benchmarks.suites.tpu import chips
from optax_lowmem._src.codecs import group_codec
from optax_lowmem._src.noise import kernels as noise_kernels
from optax_lowmem._src.noise.distributions import NOISES
from optax_lowmem.layers import fp8_flow, switchback_dot_general

Part = tuple[Callable[..., Any], tuple[Any, ...]]  # with abstract arguments
_BF16, _F32, _U32 = jnp.bfloat16, jnp.float32, jnp.uint32
_GROUP = 32
PLAIN = "bf16"  # the standard layer, beside those in 8 bits


def _array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _of(function: Callable[..., Any], *args: Any) -> Callable[[], Part]:
    return lambda: (function, args)


def _codec(shape: tuple[int, ...]) -> dict[str, Callable[[], Part]]:
    """Encode and decode of one array, with the two default codecs."""
    found: dict[str, Callable[[], Part]] = {}
    for codec in (lowmem.codecs.softsign(), lowmem.codecs.sqrt()):
        stored = codec.storage(shape, _GROUP)
        encode = functools.partial(group_codec.encode, codec, group_size=_GROUP)
        decode = functools.partial(group_codec.decode, codec, group_size=_GROUP)
        of_values = (_array(_F32, *shape), _array(_U32))
        found[f"encode-{codec.name}"] = _of(
            lambda x, key, encode=encode: encode(x, key=key), *of_values
        )
        found[f"decode-{codec.name}"] = _of(decode, *stored)
    found["compress_state(adam)"] = functools.partial(_compressed, shape)
    return found


def _compressed(shape: tuple[int, ...]) -> Part:
    """An optax optimizer whose state is stored in 8 bits."""
    tx = lowmem.compress_state(
        optax.scale_by_adam(), mu=lowmem.codecs.softsign(), nu=lowmem.codecs.sqrt()
    )
    leaf = {"kernel": _array(_F32, *shape)}
    return (lambda grads, state: tx.update(grads, state)), (leaf, jax.eval_shape(tx.init, leaf))


def _linear(tokens: int, inputs: int, outputs: int) -> dict[str, Callable[[], Part]]:
    """A layer's three products."""
    arrays = tuple(
        _array(_BF16, *x) for x in ((tokens, inputs), (inputs, outputs), (tokens, outputs))
    )
    layers = {name: linear.LAYERS[name] for name in (PLAIN, "switchback-int8", "switchback-fp8")}
    layers["llm_int8-int8"] = switchback_dot_general("llm_int8", "int8")
    return {name: _of(linear.linear(layer), *arrays) for name, layer in layers.items()}


def _flow(tokens: int, width: int, hidden: int) -> dict[str, Callable[[], Part]]:
    """Norm and gate, forward and backward, activations kept in FP8 and in bf16."""

    def both(function: Callable[..., Any], *args: Any) -> Part:
        def run(g: Any, *args: Any) -> Any:
            y, pull = jax.vjp(function, *args)
            return y, pull(g)

        return run, (jax.eval_shape(function, *args), *args)

    x, scale = _array(_BF16, tokens, width), _array(_F32, width)
    gate = _array(_BF16, tokens, hidden)

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        return fp8_flow.rms_norm(x, scale).value

    def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
        return fp8_flow.gated_product(gate, up).value

    return {
        "rms_norm": functools.partial(both, norm, x, scale),
        "gated_product": functools.partial(both, gated, gate, gate),
    }


def _noise(shape: tuple[int, int]) -> dict[str, Callable[[], Part]]:
    """Sampled weights, and what the gradient of the bitwidths takes of a gradient."""
    factor = _array(_F32, *noise_kernels.block_shape(shape))
    sums = functools.partial(noise_kernels.noise_sums, noise=NOISES["gaussws"])
    key = _array(_U32)
    return {
        "sample": _of(noise.forward("gaussws"), _array(_F32, *shape), factor, key),
        "noise_sums": _of(sums, _array(_BF16, *shape), key),
    }


# case -> implementation -> what makes its function and arguments
PARTS: dict[str, dict[str, Callable[[], Part]]] = {
    "group_codec/2048x8192": _codec((2048, 8192)),
    "group_codec/8192x8192": _codec((8192, 8192)),  # in f32 larger than a chip's own memory
    "linear/16384x4096x16384": _linear(16384, 4096, 16384),
    "linear/8192x2048x8192": _linear(8192, 2048, 8192),
    "fp8_flow/8192x2048x8192": _flow(8192, 2048, 8192),
    "fp8_flow/32768x4096x14336": _flow(32768, 4096, 14336),
    "gaussws/2048x8192": _noise((2048, 8192)),
}


def compile_part(chip: str, case: str, impl: str) -> tuple[Any, float]:
    """The program of a part for a chip, and seconds."""
    function, args = PARTS[case][impl]()
    mesh = chips.mesh(chip)
    return chips.compiled(mesh, function, *chips.replicated(mesh, args))


def ideal_bytes(case: str, impl: str) -> int:
    """Bytes of arguments and results, each once."""
    function, args = PARTS[case][impl]()
    every = (args, jax.eval_shape(function, *args))
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(every))
