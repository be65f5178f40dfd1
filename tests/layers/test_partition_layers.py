"""FP8 activations, 8-bit products and noise in programs for several devices, without arguments.

A device computes its parts by kernels. Here these are the kernels' references in plain JAX.
"""

import functools
import itertools
import os
import re
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

pytest.importorskip("flax")

from optax_lowmem import gaussws, layers  # noqa: E402
from optax_lowmem._src.arrays.shards import EVERY, Shards  # noqa: E402
from optax_lowmem._src.kernels import along_axes, gpu_kernel, partitioned, platform  # noqa: E402
from optax_lowmem._src.kernels.fallback import with_fallback  # noqa: E402
from optax_lowmem._src.layers.fp8_flow import fp8_kernel, kernels  # noqa: E402
from optax_lowmem._src.layers.noise import kernels as noise  # noqa: E402
from optax_lowmem._src.layers.noise import noise_kernel  # noqa: E402
from optax_lowmem._src.layers.quantized_matmul import (  # noqa: E402
    dispatch,
    mosaic,
    plain,
    quantize_kernel,
)
from optax_lowmem._src.layers.quantized_matmul.plain import Quantized  # noqa: E402
from optax_lowmem.layers import fp8_flow  # noqa: E402
from tests import tolerances as tol  # noqa: E402
from tests.compilation import SAME_BITS  # noqa: E402
from tests.layers.test_switchback_sharding import LAYOUTS as OF_PRODUCTS  # noqa: E402
from tests.layers.test_switchback_sharding import collectives  # noqa: E402
from tests.lowering import gpu_mesh, kernels_in, lower_for_cuda, needs_mosaic  # noqa: E402
from tests.meshes import mesh_of  # noqa: E402
from tests.tiers import rows  # noqa: E402


def store_normed(x, scale, eps, group_size, exact, backend, keep=True):
    stored, inverse, largest = kernels.store_normed_plain(x, scale, eps, group_size, exact, keep)
    return stored, inverse, largest.reshape(1)


def store_gated(given, activation, group_size, exact, backend, keep=True):
    stored, largest = kernels.store_gated_plain(given, activation, group_size, exact, keep)
    return stored, largest.reshape(1)


def quantize_both(x, absmax, to, backend, function=None, beside=()):
    values = x if function is None else function(*(v.astype(jnp.float32) for v in (x, *beside)))
    codes = kernels.quantized(values, absmax.reshape((1,) * x.ndim), to)
    return codes, transpose(codes.codes, backend)


def transpose(codes, backend):
    return jnp.moveaxis(codes, -1, 0)


def quantize_transposed(w, absmax, to, clip, backend):
    codes = plain.codes_of(w, absmax, to, clip)
    return Quantized(codes.T, plain.scales_of(absmax, to))


TWINS = {
    fp8_kernel: {
        "store_normed": store_normed,
        "store_gated": store_gated,
        "quantize_both": quantize_both,
        "transpose": transpose,
    },
    quantize_kernel: {
        "quantize_rows": lambda x, to, backend: plain.quantize_plain(x, 1, to),
        "quantize_transposed": quantize_transposed,
    },
    mosaic: {"multiply": lambda a, b, dtype: plain.multiply_plain(a, b, 1, dtype)},
    noise_kernel: {
        name: functools.partial(
            lambda function, *args, backend, **how: function(*args, **how),
            getattr(noise, f"{name}_plain"),
        )
        for name in ("sample", "noise_sums", "noise_of")
    },
}


@pytest.fixture
def gpus(monkeypatch):
    """CPU devices for which programs have kernels."""
    monkeypatch.setattr(platform, "no_gpu_reason", lambda: None)
    monkeypatch.setattr(platform, "not_hopper_reason", lambda: None)
    monkeypatch.setattr(platform, "has_mosaic_gpu", lambda: True)
    for name in ("_UNITS", "_LEAST"):
        monkeypatch.setattr(dispatch, name, (1, 1, 1))
    on_cpus = lambda _, *args, **how: with_fallback("cpu", *args, **how)  # noqa: E731
    monkeypatch.setattr(along_axes, "with_fallback", on_cpus)


@pytest.fixture
def twins(gpus, monkeypatch):
    for module, functions in TWINS.items():
        for name, function in functions.items():
            monkeypatch.setattr(module, name, function)


def mesh(sizes, shuffled=False):
    made = mesh_of(AxisType.Auto, **dict(zip("ab", sizes, strict=False)))
    if shuffled:
        places = np.random.default_rng(0).permutation(made.devices.ravel()).reshape(sizes)
        made = Mesh(places, made.axis_names, axis_types=(AxisType.Auto,) * len(sizes))
    return made


def run(function, args, sizes, of_args, of_results, shuffled=False):
    """(compiled program, results on a mesh, results on one device)."""
    the_mesh = mesh(sizes, shuffled)
    place = functools.partial(NamedSharding, the_mesh)
    of_args, of_results = (
        jax.tree.map(place, specs, is_leaf=lambda x: isinstance(x, P))
        for specs in (of_args, of_results)
    )
    jitted = functools.partial(jax.jit, function, compiler_options=SAME_BITS)
    program = jitted(in_shardings=of_args, out_shardings=of_results).lower(*args).compile()
    alone = jitted()(*jax.device_put(args, jax.devices("cpu")[0]))
    return program, program(*jax.device_put(args, of_args)), alone


def taken(program):
    """Names of the kernels of parts of arrays."""
    return set(re.findall(r"/(\w+)/custom_partitioning", program.as_text()))


def drawn(*shape, dtype=jnp.bfloat16, seed=0):
    return np.asarray(jnp.asarray(np.random.default_rng(seed).normal(0, 0.5, shape), dtype))


# ---- FP8 activations -----------------------------------------------------------------------------
BATCH, LENGTH, WIDTH, HIDDEN = 16, 8, 64, 128
BLOCK = {
    "store_normed", "store_gated", "quantized_for_products", "quantize_transposed", "multiply",
    "multiply_over_tokens",
}  # fmt: skip
# sizes of the mesh; specs of X, and of the weights before and after the activation function
FLOWS = {
    "data": ((8,), P("a"), P(), P()),
    "fsdp": ((8,), P("a"), P("a"), P("a")),
    "fsdp of outputs": ((8,), P("a"), P(None, "a"), P(None, "a")),
    "tensor": ((8,), P(), P(None, "a"), P("a")),
    "fsdp and tensor": ((2, 4), P("a"), P("a", "b"), P("b", "a")),
    "two axes of data": ((2, 4), P(("a", "b")), P("b"), P("b")),
    "sequences": ((2, 4), P("a", "b"), P(("a", "b")), P(("a", "b"))),
    "weights in more parts": ((2, 4), P("a"), P(("a", "b")), P(("a", "b"))),
    "replicated": ((8,), P(), P(), P()),
    "devices in another order": ((4, 2), P("b"), P("b", "a"), P("a", "b")),
}
OFTEN = ["fsdp", "fsdp and tensor", "sequences", "devices in another order"]


def block(x, scale, up, down, recipe):
    y = fp8_flow.linear(fp8_flow.rms_norm(x, scale, recipe=recipe), up, recipe=recipe)
    return fp8_flow.linear(fp8_flow.gated_product(y, recipe=recipe), down, recipe=recipe)


def flow(layout, recipe=fp8_flow.Recipe()):  # noqa: B008 (frozen)
    def step(x, weights, g):
        y, pull = jax.vjp(lambda x, weights: block(x, *weights, recipe), x, weights)
        return y, *pull(g)

    sizes, of_x, *of_weights = FLOWS[layout]
    x, g = (drawn(BATCH, LENGTH, WIDTH, seed=i) for i in (0, 1))
    shapes = (WIDTH,), (WIDTH, HIDDEN), (HIDDEN, WIDTH)
    weights = tuple(drawn(*shape, seed=2 + i) for i, shape in enumerate(shapes))
    specs = P(), *of_weights
    return run(
        step, (x, weights, g), sizes, (of_x, specs, of_x), (of_x, of_x, specs),
        shuffled="order" in layout,
    )  # fmt: skip


@pytest.mark.parametrize(
    "layout, recipe",
    rows(itertools.product(FLOWS, ["exact", "paper"]), [*((x, "exact") for x in OFTEN)]),
)
def test_fp8_flow(layout, recipe, twins):
    """One device's results but for the order of sums over devices, and no gather of activations."""
    check_flow(layout, {"exact": fp8_flow.Recipe(), "paper": fp8_flow.Recipe.paper()}[recipe])


def check_flow(layout, recipe):
    program, found, alone = flow(layout, recipe)
    pairs = [*zip(jax.tree.leaves(found), jax.tree.leaves(alone), strict=True)]
    for i, (a, b) in enumerate(pairs):
        a, b = np.float64(a), np.float64(b)
        assert np.abs(a - b).max() <= 2**-7 * np.abs(b).max()
        # gradients of weights are rounded to bf16 before the sum over devices
        assert i >= 2 or (a != b).mean() < 0.02
    assert taken(program) == BLOCK - (set() if recipe.exact else {"quantized_for_products"})
    moved = collectives(program.as_text())
    # XLA stores FP8 as f16 on a CPU
    gathers = {key for key in moved if key[0] == "all-gather"}
    assert {kind for _, kind, _ in gathers} <= {"f16", "f8e4m3fn", "u8"}
    assert not {kind for kind, *_ in moved} & {"all-to-all", "collective-permute"}
    assert {size for *_, size in gathers} <= {WIDTH * HIDDEN // n for n in (1, 2, 4)}


def test_fsdp_gathers_codes_once_in_each_pass(twins):
    program, *_ = flow("fsdp")
    moved = collectives(program.as_text())
    weights, kind = WIDTH * HIDDEN, "f16"  # of E4M3 on a CPU
    gathers = {key: n for key, n in moved.items() if key[0] == "all-gather"}
    assert gathers == {("all-gather", kind, weights): 4}  # of two weights
    assert moved["reduce-scatter", "f32", weights // 8] == 2  # of their gradients
    assert all(size == 1 for kind, dtype, size in moved if dtype == "s32")  # maxima of tensors


@pytest.mark.full
def test_interpreted_kernels(gpus, monkeypatch):
    launch = gpu_kernel.launch
    as_jax = lambda *args, backend, **how: launch(*args, backend="interpret", **how)  # noqa: E731
    monkeypatch.setattr(gpu_kernel, "launch", as_jax)
    monkeypatch.setattr(mosaic, "multiply", TWINS[mosaic]["multiply"])
    check_flow("fsdp and tensor", fp8_flow.Recipe())


def test_equal_calls_are_lowered_once(twins, monkeypatch):
    asked, answer = [], partitioned._jax._custom_partitioning_partition
    monkeypatch.setattr(
        partitioned._jax, "_custom_partitioning_partition",
        lambda *question: asked.append(question) or answer(*question),
    )  # fmt: skip
    number = time.time_ns() % 1_000_003  # a program that no cache has

    def quantized(weights):
        absmax = jnp.full((1, 1), number, jnp.float32)
        return [dispatch.quantize_transposed(w, None, plain.E4M3, absmax) for w in weights]

    weights = [drawn(16, 16, seed=i) for i in range(4)]
    sharding = NamedSharding(mesh((8,)), P("a"))
    jax.jit(quantized).lower(jax.device_put(weights, sharding)).compile()
    assert len(asked) == 1


def test_calls_of_other_functions_in_one_program(twins):
    def both(x):
        absmax = jnp.full((1, 1), 4, jnp.float32)
        calls = (
            kernels.quantized_for_products(function, (x,), absmax, True, now=False)[0].codes
            for function in (jax.lax.abs, jax.lax.neg, lambda x: x * 0.5, lambda x: x * 0.25)
        )
        return [codes.astype(jnp.float32) for codes in calls]

    _, found, alone = run(both, (drawn(32, 64),), (8,), P("a"), [P("a")] * 4)
    for a, b in zip(found, alone, strict=True):
        np.testing.assert_array_equal(a, b)


# ---- 8-bit products ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout, variant",
    rows(itertools.product(OF_PRODUCTS, ["switchback", "switchback_m", "llm_int8", "tensorwise"]),
         [("fsdp of inputs", "switchback"), ("rows", "switchback"), ("columns", "llm_int8")]),
)  # fmt: skip
@pytest.mark.parametrize("format", rows(["int8", "fp8"], ["int8"]))
def test_switchback(layout, variant, format, twins):
    """What XLA communicates, and one device's results."""
    of_x, of_w, of_g = (P(*(axis and "a" for axis in spec)) for spec in OF_PRODUCTS[layout])
    tokens, inputs, outputs = 64, 32, 48
    dot_general = layers.switchback_dot_general(variant, format)
    shapes = (tokens, inputs), (inputs, outputs), (tokens, outputs)
    x, w, g = (drawn(*shape, dtype=jnp.float32, seed=i) for i, shape in enumerate(shapes))

    def step(x, w, g):
        y, pull = jax.vjp(lambda x, w: dot_general(x, w, (((1,), (0,)), ((), ()))), x, w)
        return y, *pull(g)

    specs = (of_x, of_w, of_g), (of_g, of_x, of_w)
    program, found, alone = run(step, (x, w, g), (8,), *specs)
    for a, b in zip(found, alone, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=tokens * tol.F32_EPS)
    assert "multiply" in taken(program)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partitioned, "available", lambda: False)
        by_xla, *_ = run(lambda *args: step(*args), (x, w, g), (8,), *specs)
    assert not taken(by_xla)
    kinds = [
        {(kind, size) for kind, _, size in collectives(p.as_text())} for p in (program, by_xla)
    ]
    assert kinds[0] <= kinds[1]


@pytest.mark.parametrize("wanted", [P("a"), P(None, "a")])
def test_scales_of_a_scattered_sum(wanted, twins):
    """Parts of the summed axis; each row of both operands has a scale, and devices get some."""

    def product(a, b):
        a, b = (plain.quantize_plain(x, 1, plain.INT8) for x in (a, b))
        return dispatch.multiply(a, b, 1, jnp.dtype(jnp.float32))

    a, b = (drawn(16, 32, dtype=jnp.float32, seed=i) for i in (0, 1))
    program, found, alone = run(product, (a, b), (4,), (P(None, "a"), P(None, "a")), wanted)
    np.testing.assert_array_equal(found, alone)
    assert any(kind == "reduce-scatter" for kind, *_ in collectives(program.as_text()))


# ---- noise ---------------------------------------------------------------------------------------
MATRICES = {
    "rows": ((4,), P("a")),
    "columns": ((4,), P(None, "a")),
    "both": ((4, 2), P("a", "b")),
    "devices in another order": ((2, 4), P("b", "a")),
    "a stack": ((2, 4), P("a", "b")),
    "cut blocks": ((2, 4), P("b", "a")),
}


@pytest.mark.parametrize("layout", rows(MATRICES, ["both", "cut blocks"]))
def test_noise(layout, twins):
    """Every bit of one device, and no communication but where blocks are on two devices."""
    sizes, spec = MATRICES[layout]
    shape = {"a stack": (4, 256, 64), "cut blocks": (64, 256)}.get(layout, (256, 256))
    w, g = drawn(*shape, dtype=jnp.float32), drawn(*shape, seed=1)
    bits = np.full(noise.block_shape(shape), 6.0, np.float32)
    of_bits = P(None, "a") if "cut" in layout else spec

    def sampled(w, bits, g):
        out, pull = jax.vjp(lambda w, b: gaussws.sample(w, b, jnp.uint32(3)), w, bits)
        return out, *pull(g.astype(out.dtype)), gaussws.draw(jnp.uint32(1), shape)

    program, found, alone = run(
        sampled,
        (w, bits, g),
        sizes,
        (spec, of_bits, spec),
        (spec, spec, of_bits, spec),
        shuffled="order" in layout,
    )
    for a, b in zip(found, alone, strict=True):
        np.testing.assert_array_equal(a, b)
    assert taken(program) == {"sample", "noise_sums", "noise_of"}
    moved = {kind for kind, *_ in collectives(program.as_text())}
    assert moved == ({"all-gather"} if "cut" in layout else set())


# ---- the persistent compilation cache ------------------------------------------------------------
CACHE = """
import functools
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from optax_lowmem import gaussws, layers
from optax_lowmem._src.kernels import along_axes, gpu_kernel, platform
from optax_lowmem._src.kernels.fallback import with_fallback
from optax_lowmem.layers import fp8_flow

platform.no_gpu_reason = lambda: None
along_axes.with_fallback = lambda _, *args, **how: with_fallback("cpu", *args, **how)
launch = gpu_kernel.launch
gpu_kernel.launch = lambda *args, backend, **how: launch(*args, backend="interpret", **how)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
x = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16, sharding=NamedSharding(mesh, P("a")))
hits = []
jax.monitoring.register_event_listener(
    lambda event, **_: hits.append(event.rsplit("/")[-1]) if "/cache_" in event else None)


def norm(x, **how):
    return fp8_flow.rms_norm(x, x[0], **how).quantized


def product(scaling, x):
    dot = layers.switchback_dot_general("switchback", "fp8", scaling=scaling)
    return dot(x, x, (((1,), (0,)), ((), ())))


def noisy(noise, x):
    return gaussws.sample(x, jnp.full((2, 2), 6.0), jnp.uint32(3), noise=noise)


for function in (
    norm, functools.partial(norm, eps=1e-3),
    functools.partial(norm, recipe=fp8_flow.Recipe(group_size=8, exact=False)),
    functools.partial(norm, recipe=fp8_flow.Recipe(group_size=16, exact=False)),
    functools.partial(product, "format"), functools.partial(product, "unit"),
    functools.partial(noisy, "gaussws"), functools.partial(noisy, "diffq"),
):
    lowered = jax.jit(lambda x: function(x)).lower(x)
    assert "lowmem_partitioned" in lowered.as_text()
    hits.clear()
    lowered.compile()
    print(*(hit for hit in hits if hit in ("cache_hits", "cache_misses")))
"""


@pytest.mark.full
def test_persistent_cache(tmp_path):
    """A second process finds every program, and none that computes something else."""

    def run():
        flags = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
        env = os.environ | {
            "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "JAX_COMPILATION_CACHE_DIR": str(tmp_path)
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", CACHE], capture_output=True, text=True, env=env
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    assert run() == ["cache_misses"] * 8
    assert run() == ["cache_hits"] * 8


# ---- what GPUs get -------------------------------------------------------------------------------
OF_PARTS = {
    "store_normed": ["fp8_store_normed"],
    "store_gated": ["fp8_store_gated"],
    "quantized_for_products": ["fp8_quantize_both"],
    "quantize_transposed": ["quantize_transposed"],
    "multiply": ["quantized_product"],
    "multiply_over_tokens": ["fp8_quantize_both", "quantized_product"],
}


@needs_mosaic
@pytest.mark.full
def test_parts_lower_for_gpus(monkeypatch, on_hopper):
    """A device's part of each call: the kernels of its tokens, and what is reduced."""
    calls = []

    def recorded(_, kernel, plain, *args, partition):
        calls.append((partition, jax.tree.leaves(args)))
        count, result = len(calls), kernel(*args)
        del calls[count:]  # what the kernel itself calls
        return result

    x = jax.ShapeDtypeStruct((16, 128, 512), jnp.bfloat16)
    weights = [jax.ShapeDtypeStruct(s, x.dtype) for s in ((512,), (512, 1024), (1024, 512))]

    def step(x, weights, g):
        return jax.vjp(lambda x, w: block(x, *w, fp8_flow.Recipe()), x, weights)[1](g)

    with monkeypatch.context() as patch:
        patch.setattr(along_axes, "with_fallback", recorded)
        jax.make_jaxpr(step)(x, weights, x)
    devices = gpu_mesh(**{EVERY: 8})
    for partition, arrays in calls:
        shards = [
            Shards.of_tiles(
                np.arange(8).reshape(*(8 if name == "rows0" else 1 for name in names), -1)
            )
            for names in partition._operands
        ]
        cut, _, work = partition.cut(shards, [None] * len(partition._results), 8)
        parts = [
            jax.ShapeDtypeStruct(of_x.local(x.shape), x.dtype)
            for of_x, x in zip(cut, arrays, strict=True)
        ]
        each = jax.shard_map(work, mesh=devices, in_specs=P(), out_specs=P(), check_vma=False)
        text = lower_for_cuda(each, *parts, mesh=devices)
        assert kernels_in(text) == OF_PARTS[partition._name]
        reduced = "store" in partition._name or "over_tokens" in partition._name
        assert ("all_reduce" in text) == reduced, partition._name
    assert {partition._name for partition, _ in calls} == BLOCK
