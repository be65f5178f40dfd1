"""The generated Triton kernel: what it takes, its numerics, its code, and all of it on a GPU."""

import dataclasses
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.extend as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import optax_lowmem as lowmem
from optax_lowmem._src.core import jax_triton_call, platform
from optax_lowmem._src.core.groups import Tile
from optax_lowmem._src.optimizers.adam import AdamRule
from optax_lowmem._src.update import dispatch
from tests import launch_cases
from tests.launch_cases import storage
from tests.lowering import gpu_mesh

triton = pytest.importorskip("triton", reason="Triton is not installed")

from optax_lowmem._src.update import jax_triton  # noqa: E402
from tests.tiers import rows  # noqa: E402

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
FORMULAS = [name for name in launch_cases.OPTIMIZERS if name != "direction"]
TILE = Tile()
WEIGHTS = [(24, BF16), (32, BF16), (None, BF16), (None, F16), (None, F32)]


def reason(tx, dtype=BF16, shape=(64, 128)):
    (plan,) = tx.engine.plans({"w": jax.ShapeDtypeStruct(shape, dtype)})
    return jax_triton.supported(tx.engine.rule.of_leaf(plan.matrices), plan)


def test_what_it_takes():
    for make, (bits, dtype) in itertools.product(launch_cases.OPTIMIZERS.values(), WEIGHTS):
        for options in ({}, {"rounding": "nearest"}, {"group_size": 256}):
            assert reason(make(storage(master_weight_bits=bits, **options)), dtype) is None


@dataclasses.dataclass(frozen=True)
class ArcTangentRule(AdamRule):
    def update(self, g, slots, h):
        direction, slots = super().update(g, slots, h)
        return jnp.arctan(direction), slots


def with_rule(tx, rule):
    return dataclasses.replace(tx.engine, rule=rule).transformation()


NOT_KNOWN = with_rule(lowmem.flash_adamw(1e-3), ArcTangentRule())


def test_what_has_no_form_is_named():
    assert reason(NOT_KNOWN) == "the step uses `atan`, which the kernel has no form for"


@pytest.mark.parametrize("name", lowmem.OPTIMIZERS)
def test_it_takes_every_optimizer(name):
    assert reason(lowmem.OPTIMIZERS[name].make(1e-3)) is None


@pytest.mark.parametrize(
    "options",
    [
        {"nu": None},
        {"mu": lowmem.codecs.linear(), "nu": lowmem.codecs.expanded_e4m3(signed=False)},
        {"mu": lowmem.codecs.linear4(), "nu": lowmem.codecs.linear4(signed=False)},
        {"group_size": 48},
        {"group_size": 512},
        {"split": "ulp"},
    ],
)
def test_it_takes_every_storage(options):
    assert reason(lowmem.flash_adamw(1e-3, storage=storage(**options))) is None


def test_reasons_of_shape():
    tx = lowmem.flash_lion(1e-3, storage=storage())
    assert "elements" in reason(tx, shape=(1 << 16, 1 << 16))
    wide = lowmem.flash_lion(1e-3, storage=storage(group_size=1 << 17))
    assert "groups of 131072" in reason(wide, shape=(2, 1 << 17))


# ---- who takes a leaf ----------------------------------------------------------------------------


@pytest.fixture
def without_pallas(monkeypatch):
    """A GPU's JAX that does not lower Pallas through Triton."""
    monkeypatch.setattr(platform, "no_device_reason", lambda: None)
    monkeypatch.setattr(platform, "no_kernel_reason", lambda x=None: None)
    monkeypatch.setattr(platform, "has_pallas_triton", lambda: False)
    monkeypatch.setattr(platform, "has_jax_triton", lambda: True)


def chosen(tx, implementation=None):
    (plan,) = tx.engine.plans({"w": jax.ShapeDtypeStruct((64, 128), BF16)})
    return dispatch.choose(tx.engine.rule.of_leaf(plan.matrices), plan, implementation)


@pytest.mark.parametrize("optimizer", launch_cases.OPTIMIZERS)
def test_a_jax_without_pallas_picks_it(without_pallas, optimizer):
    assert chosen(launch_cases.OPTIMIZERS[optimizer](storage()))[0] == "triton"


def test_what_it_does_not_know_goes_to_xla(without_pallas):
    kernel, why = chosen(NOT_KNOWN)
    assert kernel == "xla"
    assert "no Pallas-Triton lowering" in why and "`atan`" in why


def test_without_jax_triton_xla_says_what_to_install(without_pallas, monkeypatch):
    monkeypatch.setattr(platform, "has_jax_triton", lambda: False)
    kernel, why = chosen(lowmem.flash_lion(1e-3))
    assert kernel == "xla" and "pip install jax-triton" in why


@pytest.mark.parametrize("pallas", [True, False])
def test_it_is_used_where_it_is_asked_for(without_pallas, monkeypatch, pallas):
    monkeypatch.setattr(platform, "has_pallas_triton", lambda: pallas)
    assert chosen(lowmem.flash_lion(1e-3), "triton") == ("triton", "asked for")
    with pytest.raises(ValueError, match="leaf 'w': the step uses `atan`"):
        chosen(NOT_KNOWN, "triton")


@pytest.fixture
def opaque(without_pallas, monkeypatch):
    """In jax_triton's place a primitive with its rules: none for vmap, none for axes of a mesh."""
    call = jex.core.Primitive("opaque_call")
    call.multiple_results = True
    call.def_abstract_eval(
        lambda *_, outputs: [jax.core.ShapedArray(x.shape, x.dtype) for x in outputs]
    )

    def triton_call(*operands, out_shape, **options):
        assert options["kernel"].arg_names[0] == "scalars"
        return call.bind(*operands, outputs=tuple(out_shape))

    monkeypatch.setattr(jax_triton_call, "_triton_call", lambda: triton_call)


@pytest.mark.parametrize("implementation", [None, "triton"])
def test_a_step_calls_it(opaque, implementation):
    """In a plain jit, for each of several models, and on each shard of a mesh."""
    tx = lowmem.flash_adamw(1e-3, weight_decay=0.1)
    params = {"w": jax.ShapeDtypeStruct((512, 64), BF16), "norm": jax.ShapeDtypeStruct((64,), F32)}
    state = jax.eval_shape(tx.init, params)

    def step(g, s, p):
        return lowmem.step(tx, g, s, p, implementation=implementation)

    def calls(f, *args):
        return str(jax.make_jaxpr(f)(*args)).count("opaque_call")

    models = jax.tree.map(lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype), (params, state))
    rows, whole = PartitionSpec("data"), PartitionSpec()
    specs = jax.tree.map(lambda x: rows if x.ndim else whole, (params, state))
    mapped = jax.shard_map(
        step, mesh=gpu_mesh(data=8), in_specs=(specs[0], specs[1], specs[0]), out_specs=specs
    )
    # the weight's and, as small leaves go with kernels too, that of the norm in f32
    assert calls(step, params, state, params) == 2
    assert calls(jax.vmap(step), models[0], models[1], models[0]) == 2
    assert calls(mapped, params, state, params) == 2


# ---- numerics, without a GPU ---------------------------------------------------------------------


@pytest.mark.full
def test_numerics_in_the_interpreter():
    """interpret_jax_triton.py in a process of its own, where Triton interprets."""
    tests = Path(__file__).parents[1]
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, *command, str(tests / "interpret_jax_triton.py")],
        env={**os.environ, "TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"},
        cwd=tests.parent,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-10000:] + done.stderr[-2000:]


# ---- code, without a GPU -------------------------------------------------------------------------


def compile_case(tx, shapes, tile=TILE, **options):
    case = launch_cases.make(tx, shapes, **options)
    jax.eval_shape(lambda: launch_cases.launch(case, jax_triton.launch.__wrapped__, tile))


def moved_tiles(kernel) -> int:
    """Count the layout conversions of whole tiles between threads."""
    return len(re.findall(r"convert_layout .*tensor<\d+x\d+x", kernel.asm["ttgir"]))


FAST = [
    ("adamw", (24, BF16), BF16, True),
    ("lion", (32, BF16), F16, False),
]
KINDS = list(itertools.product(FORMULAS, WEIGHTS, (BF16, F16, F32), (True, False)))
# each two values of two columns together, but for some gradients of updates and of parameters
PAIRS = [
    (FORMULAS[i], WEIGHTS[j], (BF16, F16, F32)[(i + j) % 3], (i + j) % 2 == 0)
    for i, j in itertools.product(range(len(FORMULAS)), range(len(WEIGHTS)))
]


@pytest.mark.parametrize(
    "optimizer, weight, gradient, direct", rows(dict.fromkeys(FAST + PAIRS), FAST)
)
def test_it_compiles(compiled_kernels, optimizer, weight, gradient, direct):
    """Full groups, rows that vectors fit, and rows that they do not: one kernel each."""
    bits, dtype = weight
    tx = launch_cases.OPTIMIZERS[optimizer](storage(master_weight_bits=bits))
    shapes = [(8, 256), (3, 1000), (2, 50257), (33, 64)]
    compile_case(tx, shapes, dtype=dtype, gradient_dtype=gradient, direct=direct)
    assert len(compiled_kernels) == 3
    stores_f32 = dtype == F32 or (bits is None and not direct)
    for kernel in compiled_kernels:  # threads write at most 4 f32 each side by side
        assert moved_tiles(kernel) <= stores_f32
        assert "local" not in kernel.asm["ptx"]
    for kernel in compiled_kernels[:2]:  # 8 codes a thread, 8 bytes; 16 bytes of 16-bit numbers
        ptx = kernel.asm["ptx"]
        assert "ld.volatile.global.v2.b32" in ptx and "st.global.v2.b32" in ptx
        assert gradient == F32 or "ld.volatile.global.v4.b32" in ptx


@pytest.mark.parametrize("name", ["flash_adam_mini", "flash_factored_adamw"])
def test_second_moments_of_blocks_and_of_rows_and_columns_compile(compiled_kernels, name):
    compile_case(lowmem.OPTIMIZERS[name].make(1e-3, storage=storage()), [(64, 256), (3, 16, 1000)])
    assert len(compiled_kernels) == 2
    assert all("local" not in kernel.asm["ptx"] for kernel in compiled_kernels)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["flash_adam_mini", "flash_factored_adamw"])
def test_second_moments_of_blocks_and_of_rows_and_columns(name):
    for shape in (shape for shape in GPU_SHAPES if len(shape) > 1):
        case = launch_cases.make(lowmem.OPTIMIZERS[name].make(1e-3, storage=storage()), [shape] * 2)
        launch_cases.compare(case, launch_cases.launch(case, jax_triton.launch, TILE))


@pytest.mark.parametrize("size", [1, 4, 256])
def test_group_sizes_compile(compiled_kernels, size):
    tx = launch_cases.OPTIMIZERS["adamw"](storage(group_size=size))
    compile_case(tx, [(8, 256)])
    assert len(compiled_kernels) == 1


def test_codes_that_share_bytes_compile(compiled_kernels):
    """Full groups, and rows that end in half of a byte."""
    four = {"mu": lowmem.codecs.linear4(), "nu": lowmem.codecs.linear4(signed=False)}
    tx = launch_cases.OPTIMIZERS["adamw"](storage(**four))
    compile_case(tx, [(8, 256), (3, 1000), (2, 50257)])
    assert len(compiled_kernels) == 3
    assert all("local" not in kernel.asm["ptx"] for kernel in compiled_kernels)
    ptx = compiled_kernels[0].asm["ptx"]  # 8 codes of a thread are 4 bytes
    assert "ld.volatile.global.b32" in ptx and "st.global.b32" in ptx


@pytest.mark.parametrize("tile", [Tile(2048, 4), Tile(512, 2), Tile(4096, 8)])
def test_tiles_compile(compiled_kernels, tile):
    compile_case(launch_cases.OPTIMIZERS["adamw"](storage()), [(8, 256)], tile)
    (kernel,) = compiled_kernels
    assert moved_tiles(kernel) == 0


# ---- on a GPU ------------------------------------------------------------------------------------

GPU_SHAPES = [(4097,), (8193, 64), (3, 5, 1000), (5, 50257), (7, 33), (256, 2), (2, 3, 4, 5)]


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer, weight, gradient, direct", KINDS)
def test_is_the_reference(optimizer, weight, gradient, direct):
    bits, dtype = weight
    tx = launch_cases.OPTIMIZERS[optimizer](storage(master_weight_bits=bits))
    case = launch_cases.make(tx, GPU_SHAPES, dtype, gradient, direct)
    launch_cases.compare(case, launch_cases.launch(case, jax_triton.launch, TILE))


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [Tile(1024, 4), Tile(2048, 4), Tile(512, 2), Tile(4096, 8)])
@pytest.mark.parametrize("options", [{}, {"rounding": "nearest"}, {"update_dtype": "param"}])
def test_tiles_and_options(options, tile):
    for direct in (True, False):
        tx = launch_cases.OPTIMIZERS["adamw"](storage(**options))
        case = launch_cases.make(tx, GPU_SHAPES, direct=direct)
        launch_cases.compare(case, launch_cases.launch(case, jax_triton.launch, tile))


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 4, 8, 16, 48, 64, 128, 256])
def test_group_sizes(size):
    """Not 1: a value that is its group's scale is rounded up by its last bit, which FMA changes."""
    tx = launch_cases.OPTIMIZERS["adamw"](storage(group_size=size))
    case = launch_cases.make(tx, GPU_SHAPES)
    launch_cases.compare(case, launch_cases.launch(case, jax_triton.launch, TILE))


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 32, 48, 256])
def test_codes_that_share_bytes(size):
    four = {"mu": lowmem.codecs.linear4(), "nu": lowmem.codecs.linear4(signed=False)}
    tx = launch_cases.OPTIMIZERS["adamw"](storage(group_size=size, **four))
    case = launch_cases.make(tx, GPU_SHAPES)
    launch_cases.compare(case, launch_cases.launch(case, jax_triton.launch, TILE))


@pytest.mark.gpu
def test_many_leaves_of_a_direction():
    tx = launch_cases.OPTIMIZERS["direction"](storage())
    shapes = [(5 + i, 64 if i % 2 else 33) for i in range(70)]
    case = launch_cases.make(tx, shapes, F32, direct=False)
    launch_cases.compare(case, launch_cases.launch(case, jax_triton.launch, TILE))


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [24, 32])
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("update_dtype", ["float32", "param"])
def test_weights_land_bit_for_bit(update_dtype, bits, direct):
    options = storage(master_weight_bits=bits, update_dtype=update_dtype)
    launch_cases.check_landing(jax_triton.launch, options, direct, TILE)


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["adamw", "lion", "sgd"])
def test_what_is_not_finite_shows(optimizer):
    launch_cases.check_not_finite(jax_triton.launch, optimizer, TILE)


@pytest.mark.gpu
def test_vmap_and_shard_map():
    """Of a launch: the same bits as alone."""
    case = launch_cases.make(launch_cases.OPTIMIZERS["adamw"](storage()), [(33, 64)])

    def run(g):
        leaf = case.leaves[0]._replace(g=g)
        one = dataclasses.replace(case, leaves=[leaf])
        return launch_cases.launch(one, jax_triton.launch, TILE)

    gradients = jnp.stack([case.leaves[0].g, -2 * case.leaves[0].g])
    mapped = jax.vmap(run)(gradients)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("data")
    sharded = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec)(gradients[0])
    jax.tree.map(np.testing.assert_array_equal, sharded, run(gradients[0]))
    for i in range(2):
        one = jax.tree.map(lambda x, i=i: x[i], mapped)
        jax.tree.map(np.testing.assert_array_equal, one, run(gradients[i]))
