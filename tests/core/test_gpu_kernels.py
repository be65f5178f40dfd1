"""Every GPU kernel as generated Triton, compiled without a GPU, and who runs them."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from optax_lowmem import codecs
from optax_lowmem._src.codecs import group_codec_triton
from optax_lowmem._src.fp8_flow import kernels as fp8
from optax_lowmem._src.fp8_flow import kernels_triton as fp8_kernels
from optax_lowmem._src.noise import kernels as noise
from optax_lowmem._src.noise import kernels_triton as noise_kernels
from optax_lowmem._src.noise.distributions import NOISES
from optax_lowmem._src.noise.formats import FORMATS
from optax_lowmem._src.switchback import quantized_matmul_triton
from optax_lowmem._src.switchback.quantized_matmul import FORMATS as CODES
from optax_lowmem._src.update import block_means, block_means_triton
from optax_lowmem.blocks import Block
from tests.tiers import rows

BF16, F16, F32 = map(jnp.dtype, (jnp.bfloat16, jnp.float16, jnp.float32))
KEY = jax.ShapeDtypeStruct((), jnp.uint32)


def array(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def codec(name, shape, size, dtype, stochastic=True):
    def both(x, key):
        own, kind = codecs.CODECS[name], {"backend": "triton"}
        key = key if stochastic else None
        stored = group_codec_triton.encode(own, x, size, key, "mu", **kind)
        return group_codec_triton.decode(own, *stored, size, shape[-1], **kind)

    return both, array(*shape, dtype=dtype), KEY


def sampled(name, to, split, shape):
    """A weight and its scales, with R of a distribution."""
    dtype = noise.result_dtype(FORMATS[to])
    w, correction = array(*shape, dtype=BF16 if split else F16), None
    if split:
        correction = array(*shape, dtype=codecs.SPLITS[split].dtype)

    def run(w, correction, factor, key):
        args = (NOISES[name], FORMATS[to], dtype)
        return noise_kernels.sample(w, correction, factor, key, *args, backend="triton")

    return run, w, correction, array(*noise.block_shape(shape)), KEY


def drawn(name, shape):
    def run(g, key):
        own = NOISES[name]
        return (
            noise_kernels.noise_sums(g, key, own, backend="triton"),
            noise_kernels.noise_of(key, shape, own, BF16, backend="triton"),
            noise_kernels.packed_noise(key, shape, backend="triton"),
        )

    return run, array(*shape, dtype=BF16), KEY


def normed(exact, shape, dtype):
    static = dict(eps=1e-6, group_size=16, exact=exact, backend="triton")
    run = functools.partial(fp8_kernels.store_normed, **static)
    return run, array(*shape, dtype=dtype), array(shape[-1], dtype=BF16)


def gated(activation, inputs, shape):
    static = dict(activation=activation, group_size=16, exact=inputs == 1, backend="triton")
    run = functools.partial(fp8_kernels.store_gated, **static)
    return run, (array(*shape, dtype=BF16),) * inputs


def quantized(to, dtype):
    def run(x, absmax):
        how = (CODES[to],)
        codes = quantized_matmul_triton.quantize_rows(x, *how, backend="triton")
        both = fp8_kernels.quantize_both(x, absmax, *how, backend="triton")
        turned = quantized_matmul_triton.quantize_transposed(
            x, absmax, *how, clip=True, backend="triton"
        )
        return codes, both, turned, fp8_kernels.transpose(codes.codes, backend="triton")

    return run, array(130, 200, dtype=dtype), array()


def means(shape, block, count):
    def run(*gradients):
        own = block_means.passes(block, shape)
        return block_means_triton.means(own, gradients, jnp.float32(0.5), backend="triton")

    return run, *[array(*shape, dtype=BF16)] * count


CODEC_FORMS = [((30, 50), 24, F32, False), ((30, 512), 256, F16, True)]
FAST = {
    "codec": codec("linear-int4", (64, 96), 32, BF16),
    "sample": sampled("gaussws", "bfloat16", "bits-24", (64, 300)),
    "norm": normed(False, (33, 1000), BF16),
    "gate": gated("gelu_exact", 2, (64, 256)),
    "quantized": quantized("e4m3", BF16),
    "means": means((300, 130), Block((0, 1)), 3),
}
KERNELS = {
    **FAST,
    **{f"codec {name}": codec(name, *CODEC_FORMS[i % 2]) for i, name in enumerate(codecs.CODECS)},
    **{
        f"sample {to}": sampled([*NOISES][i % 3], to, [None, *codecs.SPLITS][i % 5], (2, 40, 70))
        for i, to in enumerate(FORMATS)
    },
    **{f"noise {name}": drawn(name, (64, 130)) for name in NOISES},
    **{
        f"norm {exact} {dtype.name}": normed(exact, (5, 4100), dtype)
        for exact in (True, False)
        for dtype in (F32, BF16, F16)
    },
    **{
        f"gate {activation} {inputs}": gated(activation, inputs, (31, 100))
        for activation in fp8.ACTIVATIONS
        for inputs in (1, 2)
    },
    **{
        f"quantized {to} {dtype.name}": quantized(to, dtype) for to in CODES for dtype in (F32, F16)
    },
    "means of heads": means((130, 4, 33), Block((0, 2)), 2),
    "means of one": means((128, 96), Block((0,), heads=(1, 4)), 1),
}


@pytest.mark.parametrize("name", rows(KERNELS, list(FAST)))
def test_it_compiles(name, compiled_kernels):
    run, *given = KERNELS[name]
    jax.eval_shape(run, *given)
    assert compiled_kernels
    for kernel in compiled_kernels:
        assert re.search(r"st\.global", kernel.asm["ptx"])
        assert ".local" not in kernel.asm["ptx"]
