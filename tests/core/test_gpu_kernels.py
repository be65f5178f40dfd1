"""Every GPU kernel as generated Triton, compiled without a GPU, and who runs them."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest

from optax_lowmem import codecs, gaussws
from optax_lowmem._src.arrays.block import Factors
from optax_lowmem._src.kernels import gpu_triton, group_codec, platform
from optax_lowmem._src.layers import quantized_matmul as matmul
from optax_lowmem._src.layers.fp8_flow import fp8_kernel
from optax_lowmem._src.layers.fp8_flow import kernels as fp8
from optax_lowmem._src.layers.fp8_flow import norm as fp8_norm
from optax_lowmem._src.layers.fp8_flow.storage import ArrayFunction, Recipe
from optax_lowmem._src.layers.noise import kernels as noise
from optax_lowmem._src.layers.noise import noise_kernel
from optax_lowmem._src.layers.noise.distributions import NOISES
from optax_lowmem._src.layers.noise.formats import FORMATS
from optax_lowmem._src.layers.quantized_matmul import FORMATS as CODES
from optax_lowmem._src.layers.quantized_matmul import dispatch, quantize_kernel
from optax_lowmem._src.optim.blocks import block_means, block_means_kernel
from optax_lowmem.blocks import Block
from tests.tiers import rows

BF16, F16, F32 = map(jnp.dtype, (jnp.bfloat16, jnp.float16, jnp.float32))
KEY = jax.ShapeDtypeStruct((), jnp.uint32)


def array(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def codec(name, shape, size, dtype, stochastic=True):
    def encode(x, key):
        key = key if stochastic else None
        own = codecs.CODECS[name]
        return group_codec.encode_by_kernel(own, x, size, key, "mu", backend="triton")

    return encode, array(*shape, dtype=dtype), KEY


def sampled(name, to, split, shape):
    """A weight and its scales, with R of a distribution."""
    dtype = noise.result_dtype(FORMATS[to])
    w, correction = array(*shape, dtype=BF16 if split else F16), None
    if split:
        correction = array(*shape, dtype=codecs.SPLITS[split].dtype)

    def run(w, correction, factor, key):
        args = (NOISES[name], FORMATS[to], dtype)
        return noise_kernel.sample(w, correction, factor, key, *args, backend="triton")

    return run, w, correction, array(*noise.block_shape(shape)), KEY


def drawn(name, shape):
    def run(g, key):
        own = NOISES[name]
        return (
            noise_kernel.noise_sums(g, key, own, backend="triton"),
            noise_kernel.noise_of(key, shape, own, BF16, backend="triton"),
        )

    return run, array(*shape, dtype=BF16), KEY


def normed(exact, shape, dtype):
    static = dict(eps=1e-6, group_size=16, exact=exact, backend="triton")
    run = functools.partial(fp8_kernel.store_normed, **static)
    return run, array(*shape, dtype=dtype), array(shape[-1], dtype=BF16)


def gated(activation, inputs, shape):
    static = dict(activation=activation, group_size=16, exact=inputs == 1, backend="triton")
    run = functools.partial(fp8_kernel.store_gated, **static)
    return run, (array(*shape, dtype=BF16),) * inputs


def quantized(to, dtype):
    def run(x, absmax):
        how = (CODES[to],)
        codes = quantize_kernel.quantize_rows(x, *how, backend="triton")
        both = fp8_kernel.quantize_both(x, absmax, *how, backend="triton")
        turned = quantize_kernel.quantize_transposed(x, absmax, *how, clip=True, backend="triton")
        return codes, both, turned, fp8_kernel.transpose(codes.codes, backend="triton")

    return run, array(130, 200, dtype=dtype), array()


def of_function(dtype):
    """A norm's and a gate's codes in both layouts, and maxima where nothing is stored."""
    own = fp8_norm._Norm(Recipe(), 1e-6), "silu"
    normed, gated = map(ArrayFunction, (fp8_norm._scaled, fp8.gated), own)
    static = dict(group_size=16, exact=True, backend="triton", keep=False)

    def run(x, scale, inverse, absmax):
        how = (absmax, CODES["e4m3"], "triton")
        return (
            fp8_kernel.quantize_both(x, *how, normed, (scale[None], inverse)),
            fp8_kernel.quantize_both(x, *how, gated, (x,)),
            fp8_kernel.store_normed(x, scale, 1e-6, **static),
            fp8_kernel.store_gated((x, x), "silu", **static),
        )

    return run, array(130, 200, dtype=dtype), array(200), array(130, 1), array()


def means(shape, block, count):
    def run(*gradients):
        own = block_means.passes(block, shape)
        return block_means_kernel.means(own, gradients, jnp.float32(0.5), backend="triton")

    return run, *[array(*shape, dtype=BF16)] * count


def taken_apart(shape, axes):
    block = Factors(axes)

    def run(*values):
        return block_means_kernel.factors(block, shape, values, backend="triton")

    return run, *[array(*block.mean_shape(shape))] * 2


CODEC_FORMS = [((30, 50), 24, F32, False), ((30, 512), 256, F16, True)]
FAST = {
    "codec": codec("linear-int4", (64, 96), 32, BF16),
    "sample": sampled("gaussws", "bfloat16", "bits-24", (64, 300)),
    "norm": normed(False, (33, 1000), BF16),
    "gate": gated("gelu_exact", 2, (64, 256)),
    "quantized": quantized("e4m3", BF16),
    "of a function": of_function(BF16),
    "means": means((300, 130), Block((0, 1)), 3),
    "means of rows and columns": means((2, 140, 2, 256), Factors((1, 3)), 2),
    "rows and columns apart": taken_apart((2, 140, 2, 256), (1, 3)),
}
KERNELS = {
    **FAST,
    **{f"codec {name}": codec(name, *CODEC_FORMS[i % 2]) for i, name in enumerate(codecs.CODECS)},
    **{
        f"sample {[*NOISES][i % 3]} {to}": sampled(
            [*NOISES][i % 3], to, [None, *codecs.SPLITS][i % 5], (2, 40, 70)
        )
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
    "of a function in f32": of_function(F32),
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
        # but for sines, whose large arguments CUDA reduces in an array
        assert "box-muller" in name or ".local" not in kernel.asm["ptx"]


@pytest.mark.parametrize("compiled_kernels", [80], indirect=True)
def test_ampere_converts_e4m3_by_bits(compiled_kernels):
    """It has no instruction for E4M3, and not even a type of it in Triton."""
    run, *given = KERNELS["norm"]
    jax.eval_shape(run, *given)
    (kernel,) = compiled_kernels
    assert "e4m3" not in kernel.asm["ptx"] and "f8E4M3" not in kernel.asm["ttgir"]


def test_loads_of_means_are_held(compiled_kernels):
    """A barrier keeps them above the factor's, which all arithmetic needs."""
    run, *given = means((8192, 512), Block((0,)), 2)
    jax.eval_shape(run, *given)
    ptx = compiled_kernels[0].asm["ptx"]
    last_of_tile = [found.start() for found in re.finditer(r"ld\.volatile\.global", ptx)][-1]
    assert last_of_tile < ptx.index("bar.sync") < ptx.index("ld.global")


# ---- who runs them -------------------------------------------------------------------------------
@pytest.fixture
def without_pallas_triton(on_a_gpu, monkeypatch):
    """A GPU whose JAX lowers no Pallas through Triton, with jax-triton; names of what it calls."""
    called = []

    def triton_call(*operands, name, out_shape, **options):
        called.append(name)
        return [jnp.zeros(like.shape, like.dtype) for like in out_shape]

    monkeypatch.setattr(platform, "has_pallas_triton", lambda: False)
    monkeypatch.setattr(platform, "has_jax_triton", lambda: True)
    monkeypatch.setattr(gpu_triton, "_triton_call", lambda: triton_call)
    jax.clear_caches()
    yield called
    jax.clear_caches()


def encoded(x):
    stored = group_codec.encode(codecs.linear4(), x, 32, jnp.uint32(1))
    return group_codec.decode(codecs.linear4(), *stored, 32, x.shape[-1])


def noisy(w):
    sampled, pull = jax.vjp(lambda b: gaussws.sample(w, b, jnp.uint32(3)), jnp.full((2, 8), 6.0))
    r = gaussws.draw(jnp.uint32(1), (40, 70), noise="gaussws", dtype=BF16)
    return pull(sampled), r


def stored(x):
    normed = fp8.store_normed(x, jnp.ones(x.shape[-1]), 1e-6, 16, True)
    return normed, [fp8.store_gated((x, x), name, 16, False) for name in fp8.ACTIVATIONS]


def in_codes(x):
    return matmul.quantize(x, 1, matmul.INT8), matmul.quantize_transposed(x, None, matmul.INT8)


def averaged(*gradients):
    return block_means.means_of_squares([Block((0,))] * len(gradients), gradients)


PUBLIC = {
    "group codec": (encoded, [(64, 256)], ["group_encode"]),
    "noise": (noisy, [(64, 256)], ["noise", "noise_sums", "sample_weights"]),
    "fp8": (stored, [(64, 256)], ["fp8_store_gated"] * 4 + ["fp8_store_normed"]),
    "codes": (in_codes, [(64, 256)], ["quantize_rows", "quantize_transposed"]),
    "means": (averaged, [(512, 256)] * 2, ["block_means"] * 2),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_without_pallas_triton_it_is_generated(name, without_pallas_triton):
    """Nothing is lost, and nothing is left to Pallas."""
    run, shapes, kernels = PUBLIC[name]
    text = str(jax.make_jaxpr(run)(*(array(*shape) for shape in shapes)))
    assert sorted(without_pallas_triton) == sorted(kernels)
    assert "pallas_call" not in text


@pytest.mark.parametrize("name", PUBLIC)
def test_without_either_it_is_left_to_xla(name, without_pallas_triton, monkeypatch):
    monkeypatch.setattr(platform, "has_jax_triton", lambda: False)
    run, shapes, _ = PUBLIC[name]
    text = str(jax.make_jaxpr(run)(*(array(*shape) for shape in shapes)))
    assert without_pallas_triton == [] and "pallas_call" not in text


def test_reasons(without_pallas_triton, monkeypatch):
    """Each kernel's own question says what is missing, and what to install."""
    x = array(512, 256)

    def reasons():
        return [
            group_codec.unsupported(x, 32, codecs.softsign()),
            noise.no_kernel_reason(x, x.shape, F32),
            fp8.unsupported(x, 16),
            dispatch._rows_reason(x),
            block_means.unsupported(Block((0,)), x),
        ]

    assert reasons() == [None] * 5
    monkeypatch.setattr(platform, "has_jax_triton", lambda: False)
    for reason in reasons():
        assert "no Pallas-Triton lowering" in reason and "pip install jax-triton" in reason


@dataclasses.dataclass(frozen=True)
class SortedCodec(codecs.CODECS["linear-int8"].__class__):
    def quantize(self, x, divisor, noise=None):
        return super().quantize(jnp.sort(x), divisor, noise)


def test_a_codec_with_no_form_is_named(without_pallas_triton):
    own = SortedCodec(scale=codecs.linear().scale)
    reason = group_codec.unsupported(array(4, 64), 32, own)
    assert reason == f"{own.name} uses `sort`, which generated Triton does not support"


def test_a_lowering_that_lost_a_function_is_none(monkeypatch):
    """As one that is gone; JAX says that it will go."""
    assert platform.has_pallas_triton.__wrapped__()
    from jax.experimental.pallas import triton

    monkeypatch.delattr(triton, "elementwise_inline_asm")
    assert not platform.has_pallas_triton.__wrapped__()
