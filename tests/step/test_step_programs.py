"""Programs of the step's kernels: who takes a leaf, what is lowered, and Triton's code."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.extend as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lowmem as lowmem
from optax_lowmem._src.arrays.groups import Tile
from optax_lowmem._src.kernels import gpu_triton, platform, step_arguments
from optax_lowmem._src.optim.step import backend, tuning
from optax_lowmem._src.optim.step import gpu as gpu_step
from optax_lowmem._src.optim.step.tpu import pallas_tpu
from optax_lowmem.sharding import state_shardings
from tests import launch_cases, tolerances
from tests.compilation import SAME_BITS
from tests.contract_cases import RULES, covering, pairwise
from tests.launch_cases import storage
from tests.lowering import (
    gpu_mesh,
    kernels_in,
    lower_for_cuda,
    lower_for_tpu,
    tpu_kernels_in,
    tpu_mesh,
)
from tests.step.test_sharding import COLLECTIVES
from tests.step.test_step_backends import (
    BF16,
    F16,
    F32,
    LEARNING_RATE,
    NOT_KNOWN,
    SHAPES,
    STORED,
    VARIANTS,
    WEIGHTS,
    builder,
)
from tests.tiers import rows


# ---- who takes a leaf: generated Triton ----------------------------------------------------------
@pytest.fixture
def without_pallas(monkeypatch):
    """A GPU's JAX that does not lower Pallas through Triton."""
    monkeypatch.setattr(platform, "no_gpu_reason", lambda: None)
    monkeypatch.setattr(platform, "has_pallas_triton", lambda: False)
    monkeypatch.setattr(platform, "has_jax_triton", lambda: True)


def chosen(tx, implementation=None):
    (plan,) = tx.engine.plans({"w": jax.ShapeDtypeStruct((64, 128), BF16)})
    return backend.choose(tx.engine.rule.for_leaf(plan.matrices), plan, implementation)


@pytest.mark.parametrize("optimizer", launch_cases.OPTIMIZERS)
def test_a_jax_without_pallas_picks_it(without_pallas, optimizer):
    assert chosen(launch_cases.OPTIMIZERS[optimizer](storage()))[0] == "triton"


def test_what_it_does_not_know_goes_to_xla(without_pallas):
    kernel, why = chosen(NOT_KNOWN(1e-3))
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
        chosen(NOT_KNOWN(1e-3), "triton")


@pytest.fixture
def opaque(without_pallas, monkeypatch):
    """In jax_triton's place a primitive with its rules: none for vmap, none for axes of a mesh."""
    pytest.importorskip("triton", reason="Triton is not installed")
    call = jex.core.Primitive("opaque_call")
    call.multiple_results = True
    call.def_abstract_eval(
        lambda *_, outputs: [jax.core.ShapedArray(x.shape, x.dtype) for x in outputs]
    )

    def triton_call(*operands, out_shape, **options):
        assert options["name"] == "fused_update"
        return call.bind(*operands, outputs=tuple(out_shape))

    monkeypatch.setattr(gpu_triton, "_triton_call", lambda: triton_call)


@pytest.mark.parametrize("implementation", [None, "triton"])
def test_a_step_calls_it(opaque, implementation):
    tx = lowmem.flash_adamw(1e-3, weight_decay=0.1)
    params = {"w": jax.ShapeDtypeStruct((512, 64), BF16), "norm": jax.ShapeDtypeStruct((64,), F32)}
    state = jax.eval_shape(tx.init, params)

    def step(g, s, p):
        return lowmem.step(tx, g, s, p, implementation=implementation)

    def calls(f, *args):
        return str(jax.make_jaxpr(f)(*args)).count("opaque_call")

    models = jax.tree.map(lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype), (params, state))
    specs = jax.tree.map(lambda x: P("data") if x.ndim else P(), (params, state))
    mapped = jax.shard_map(
        step, mesh=gpu_mesh(data=8), in_specs=(specs[0], specs[1], specs[0]), out_specs=specs
    )
    # the weight's and, as small leaves go with kernels too, that of the norm in f32
    assert calls(step, params, state, params) == 2
    assert calls(jax.vmap(step), models[0], models[1], models[0]) == 2
    assert calls(mapped, params, state, params) == 2


# ---- Pallas, lowered for CUDA --------------------------------------------------------------------
def lowered(tx, shapes, dtype, direct, gradient_dtype=BF16):
    """Lower a step, or an update, for CUDA and return its StableHLO."""
    params = {f"leaf{i}": jax.ShapeDtypeStruct(s, dtype) for i, s in enumerate(shapes)}
    grads = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, gradient_dtype), params)
    run = functools.partial(lowmem.step, tx) if direct else functools.partial(tx.update)
    return lower_for_cuda(run, grads, jax.eval_shape(tx.init, params), params)


def alias_counts(text):
    """(results, those that take the place of an operand) of each launch."""
    found = []
    for line in text.splitlines():
        if "@__gpu$xla.gpu.triton" not in line:
            continue
        operands_of, results = re.search(r": \(([^()]*)\) -> \(?([^()]*)\)?$", line).groups()
        types = [re.findall(r"tensor<[^>]*>", part) for part in (operands_of, results)]
        pairs = re.findall(r"indices = \[(\d*)\], operand_index = (\d+)", line)
        for result, operand in pairs:
            assert types[0][int(operand)] == types[1][int(result or 0)]
        assert len({operand for _, operand in pairs}) == len(pairs)
        found.append((len(types[1]), len({result for result, _ in pairs})))
    return found


GROUP_SIZES = (32, 64, 48)
LOWERED = pairwise([
    [n for n in RULES if n in launch_cases.ALIKE], list(STORED), WEIGHTS, (True, False), GROUP_SIZES
])  # fmt: skip


@pytest.mark.filterwarnings("ignore:second moments that many elements share")
@pytest.mark.parametrize(
    "optimizer, stored, weights, direct, group_size", rows(LOWERED, covering(LOWERED))
)
def test_lowers_for_cuda(on_a_gpu, optimizer, stored, weights, direct, group_size):
    """Every rule, codec and width; in place but for updates, which are new arrays."""
    bits, dtype = weights
    how = dict(master_weight_bits=bits, group_size=group_size, **STORED[stored])
    shapes = [shape for pair in SHAPES for shape in pair]
    tx = builder(optimizer)(storage=storage(**how))
    gradient_dtype = (BF16, F32, F16)[group_size % 3]
    text = lowered(tx, shapes, dtype, direct, gradient_dtype)
    slots = tx.engine.rule.slots

    def stored_arrays(blockwise):
        names = [slot.name for slot in slots if slot.blockwise == blockwise]
        coded = [STORED[stored].get(name, "default") for name in names]
        return len(coded) + sum(codec is not None for codec in coded)

    arrays = 1 + (bits is not None) + stored_arrays(False)
    in_place = arrays if direct else arrays - 1
    wanted = [(3 * arrays, 3 * in_place), (arrays, in_place)]
    if tx.engine.rule.prepares == "blocks":  # a launch before, of all four leaves' one block
        count = stored_arrays(True)
        wanted.insert(0, (4 * (1 + count), 4 * count))
    named = list(zip(kernels_in(text), alias_counts(text), strict=True))
    found = [counts for kernel, counts in named if kernel == "fused_update"]
    # rows and columns taken apart, in new arrays: a launch for each shape with matrices
    apart = [counts for kernel, counts in named if kernel == "block_factors"]
    factored = optimizer == "flash_factored_adamw"
    assert apart == [(2, 0)] * (3 if factored else 0) and len(found) + len(apart) == len(named)
    if factored:  # matrices and vectors are no launch's together
        found, wanted = ([tuple(map(sum, zip(*rows, strict=True)))] for rows in (found, wanted))
    assert found == wanted


def with_storage(optimizer, how):
    make = builder(optimizer)
    more = how | ({"update_dtype": "float32"} if "weights" in how else {})
    return lambda storage: make(storage=dataclasses.replace(storage, **more))


MORE = {
    **{name: builder(optimizer) for name, (optimizer, how, _) in VARIANTS.items() if not how},
    "no momentum": functools.partial(lowmem.flash_sgd, LEARNING_RATE),
    "lion's direction": lowmem.scale_by_flash_lion,
    "smooth lion": functools.partial(lowmem.scale_by_flash_lion, mode="smooth", smooth_beta=2.0),
    "refined lion": functools.partial(lowmem.scale_by_flash_lion, mode="refined"),
    "a trace": functools.partial(lowmem.flash_trace, 0.9),
    "f16 moments": functools.partial(lowmem.flash_adam, LEARNING_RATE, mu_dtype=F16),
    **{
        name: with_storage(*VARIANTS[name][:2])
        for name in ("rounded weights", "int8 weights", "error feedback", "FP8 weights")
    },
    "into moments": lambda storage: lowmem.accumulate_gradients(
        lowmem.flash_adamw(LEARNING_RATE, storage=storage), 4, "moments"
    ),
}


@pytest.mark.parametrize(
    "name, direct",
    rows(
        itertools.product(MORE, [True, False]),
        [(name, i % 4 == 0) for i, name in enumerate(MORE) if i % 2 == 0],
    ),
)
def test_variants_lower_for_cuda(on_a_gpu, name, direct):
    more = MORE[name]
    mu = {"mu": None} if more is MORE["f16 moments"] else {}
    how = {"update_dtype": "param"} if direct else {"split": "ulp"}
    text = lowered(more(storage=storage(**how, **mu)), SHAPES[0], BF16, direct)
    assert kernels_in(text) == ["fused_update"]


TILES = [Tile(256, 1), Tile(1024, 4), Tile(4096, 8)]


@pytest.mark.parametrize("tile", rows(TILES, TILES[:1]), ids=str)
def test_tiles_lower_for_cuda(on_a_gpu, tile):
    shapes = [(64, 64), (3, 50257), (2, 3, 50), (5, 1)]
    with step_arguments.stepping(tuning=tuning.Tuning(tile)):
        for size in (24, 32, 5000):
            tx = builder("flash_adamw")(storage=storage(group_size=size))
            assert kernels_in(lowered(tx, shapes, BF16, True))


# ---- generated Triton, compiled ------------------------------------------------------------------
def compile_case(tx, shapes, tile=None, **options):
    case = launch_cases.make(tx, shapes, **options)
    launch = functools.partial(gpu_step.launch.__wrapped__, backend="triton")
    jax.eval_shape(lambda: launch_cases.launch(case, launch, tile or Tile()))


def moved_tiles(kernel) -> int:
    """Count the layout conversions of whole tiles between threads."""
    return len(re.findall(r"convert_layout .*tensor<\d+x\d+x", kernel.asm["ttgir"]))


FORMULAS = [name for name in launch_cases.OPTIMIZERS if name != "direction"]
OF_WEIGHTS = [(24, BF16), (32, BF16), (None, BF16), (None, F16), (None, F32)]
IN_CI = [("adamw", (24, BF16), BF16, True), ("lion", (32, BF16), F16, False)]
# each two values of two columns together, but for some gradients of updates and of parameters
PAIRS = [
    (FORMULAS[i], OF_WEIGHTS[j], (BF16, F16, F32)[(i + j) % 3], (i + j) % 2 == 0)
    for i, j in itertools.product(range(len(FORMULAS)), range(len(OF_WEIGHTS)))
]


@pytest.mark.parametrize(
    "optimizer, weight, gradient, direct", rows(dict.fromkeys(IN_CI + PAIRS), IN_CI[:1])
)
def test_it_compiles(compiled_kernels, optimizer, weight, gradient, direct):
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


FULL, ENDS = [(8, 256)], [(3, 1000), (2, 50257)]  # the latter in half of a byte
CODE = {  # optimizer, storage, shapes, tile, kernels
    "blocks": ("flash_adam_mini", {}, [(64, 256), (3, 16, 1000)], None, 2),
    "factors": ("flash_factored_adamw", {}, [(64, 256), (3, 16, 1000)], None, 2),
    **{f"groups of {size}": ("flash_adamw", {"group_size": size}, FULL, None, 1)
       for size in (1, 4, 256)},
    "4 bits": ("flash_adamw", STORED["4 bits"], FULL + ENDS, None, 3),
    **{f"{tile}": ("flash_adamw", {}, FULL, tile, 1)
       for tile in (Tile(2048, 4), Tile(512, 2), Tile(4096, 8))},
}  # fmt: skip
IN_FULL = ("groups of 4", str(Tile(2048, 4)))


@pytest.mark.parametrize("name", rows(CODE, [n for n in CODE if n not in IN_FULL]))
def test_its_code(compiled_kernels, name):
    optimizer, how, shapes, tile, count = CODE[name]
    compile_case(builder(optimizer)(storage=storage(**how)), shapes, tile)
    assert len(compiled_kernels) == count
    if tile is not None:
        assert moved_tiles(compiled_kernels[0]) == 0
    if "groups" not in name:
        assert all("local" not in kernel.asm["ptx"] for kernel in compiled_kernels)
    if name == "4 bits":
        ptx = compiled_kernels[0].asm["ptx"]  # 8 codes of a thread are 4 bytes
        assert "ld.volatile.global.b32" in ptx and "st.global.b32" in ptx


# ---- programs for a TPU --------------------------------------------------------------------------
ON_TPU = {"implementation": "pallas_tpu"}
TREE = {"w": (64, 512), "stack": (2, 64, 256), "odd": (64, 100), "bias": (64,)}


def abstract(tx, shapes=TREE):
    params = {name: jax.ShapeDtypeStruct(shape, BF16) for name, shape in shapes.items()}
    return params, jax.eval_shape(tx.init, params), params


@pytest.mark.parametrize("optimizer", rows(lowmem.OPTIMIZERS, ["flash_adam_mini", "stable_adamw"]))
def test_traced_anywhere(optimizer):
    # the leaves here have fewer rows and columns than are factored by default
    more = {"min_dim_size_to_factor": 64} if optimizer == "flash_factored_adamw" else {}
    tx = lowmem.OPTIMIZERS[optimizer].make(1e-3, **more)
    text = lower_for_tpu(functools.partial(lowmem.step, tx, **ON_TPU), *abstract(tx))
    assert set(tpu_kernels_in(text)) == {"fused_update"}


@pytest.mark.parametrize("optimizer", rows(lowmem.OPTIMIZERS, ["flash_adamw"]))
def test_no_program_has_the_kernel_unless_it_is_asked_for(optimizer):
    """No TPU has run it yet."""
    tx = lowmem.OPTIMIZERS[optimizer].make(1e-3)
    for step in (functools.partial(lowmem.step, tx), tx.update):
        assert not tpu_kernels_in(lower_for_tpu(step, *abstract(tx)))


def test_a_mesh_says_what_a_program_is_for():
    one = AbstractDevice("TPU v5 lite", platform="tpu", num_cores=1)
    mesh = AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=one)
    assert platform.target() is None
    seen = []
    see = jax.jit(lambda x: seen.append(platform.target(x)))
    see.trace(jax.ShapeDtypeStruct((8,), F32, sharding=NamedSharding(mesh, P())))
    with jax.sharding.use_abstract_mesh(mesh):
        see.trace(jax.ShapeDtypeStruct((9,), F32))
    with jax.default_device(jax.devices("cpu")[0]):
        see.trace(jax.ShapeDtypeStruct((10,), F32))
    here = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:1])
    see.trace(jax.device_put(jnp.ones(11), NamedSharding(here, P())))
    see.trace(jnp.ones(12))
    assert seen == ["tpu", "tpu", "cpu", "cpu", None]


def test_arrays_on_a_mesh_of_tpus():
    """Nothing but their NamedSharding tells, and Pallas finds which TPU it is."""
    tx = lowmem.flash_lion(1e-3)

    def kernels(mesh):
        given = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P())),
            abstract(tx),
        )
        traced = jax.jit(functools.partial(lowmem.step, tx, **ON_TPU)).trace(*given)
        return set(tpu_kernels_in(traced.lower(lowering_platforms=("tpu",)).as_text()))

    assert kernels(tpu_mesh(x=1)) == {"fused_update"}
    assert kernels(tpu_mesh(x=4)) == set()


def test_reasons():
    tx = lowmem.flash_adamw(1e-3, storage=lowmem.Storage(policy=launch_cases.POLICY))
    params = abstract(tx)[0]
    with jax.sharding.use_abstract_mesh(tpu_mesh()):
        found = str(lowmem.explain(tx, params))
    asks = "no TPU has run the kernel yet; implementation='pallas_tpu' of lowmem.step asks for it"
    assert f"xla updates 2 of 4 leaves: {asks}" in found
    assert "pallas_tpu: its last axis, 100, is not a multiple of 128" in found


def test_asked_for():
    """Leaves that the kernel does not support are XLA's."""
    tx = lowmem.flash_adamw(1e-3, storage=lowmem.Storage(policy=launch_cases.POLICY))
    step = functools.partial(lowmem.step, tx, **ON_TPU)
    with pytest.raises(ValueError, match="leaf 'w': the default backend is cpu"):
        jax.eval_shape(step, *abstract(tx, {"w": (64, 512)}))
    assert len(tpu_kernels_in(lower_for_tpu(step, *abstract(tx)))) == 2  # of four leaves


def test_on_a_machine_with_a_tpu_the_compiler_chooses(monkeypatch):
    """Both branches are traced where nothing says what a program is for."""
    tx, shapes = lowmem.flash_adamw(1e-3), {"w": (64, 512)}
    params = {"w": jnp.ones((64, 512), BF16)}
    plain = functools.partial(lowmem.step, tx)
    wanted = jax.jit(lambda *tree: plain(*tree))(params, tx.init(params), params)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert "pallas_call" not in str(
        jax.make_jaxpr(lambda *tree: plain(*tree))(*abstract(tx, shapes))
    )
    step = functools.partial(plain, **ON_TPU)
    traced = str(jax.make_jaxpr(lambda *tree: step(*tree))(*abstract(tx, shapes)))
    assert "platform_index" in traced and traced.count("pallas_call") == 1
    found = jax.jit(lambda *tree: step(*tree))(params, tx.init(params), params)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.fixture
def interpreted(monkeypatch):
    """Programs are traced for a TPU, and the kernel runs as plain JAX."""
    launch = functools.partial(pallas_tpu.launch, interpret=True)
    monkeypatch.setattr(pallas_tpu, "launch", launch)
    monkeypatch.setattr(platform, "target", lambda *args, **named: "tpu")


OF_BLOCKS = {"one": (0, 1), "of columns": (0,), "of rows": (1,)}
ON_MESHES = {
    "flash_adamw": (lowmem.flash_adamw, set()),
    "flash_lion": (lowmem.flash_lion, set()),
    **{
        f"blocks, {name}": (
            functools.partial(
                lowmem.flash_adam_mini,
                blocks=lowmem.blocks.Structure(rules=[("w", lowmem.blocks.Block(axes))]),
            ),
            {"all-reduce", "all-gather"},
        )
        for name, axes in OF_BLOCKS.items()
    },
    # their array has both after each other, so that its parts are not those of either
    "rows and columns": (
        lowmem.flash_factored_adamw, {"all-reduce", "all-gather", "collective-permute"},
    ),
    "a mean": (functools.partial(lowmem.stable_adamw, threshold=0.5), {"all-reduce"}),
}  # fmt: skip
IN_DEFAULT = [("flash_lion", P("b", "a")), ("a mean", P("b", "a"))]
IN_DEFAULT += [("blocks, of columns", P("b", "a")), ("rows and columns", P("b", "a"))]


@pytest.mark.parametrize(
    "name, spec",
    rows(itertools.product(ON_MESHES, [P("a"), P(None, "a"), P("b", "a")]), IN_DEFAULT),
)
def test_on_a_mesh_of_tpus(name, spec, interpreted):
    """Each device steps its part, with the random bits that the whole leaf has there.

    It takes the values of its blocks, which may lie on several devices.
    """
    build, collectives = ON_MESHES[name]
    tx, rng = build(1e-3), np.random.default_rng(0)
    masters = {"w": jnp.asarray(rng.normal(0, 0.1, (256, 512)), F32)}
    # whose squares have one sum, in any order
    sizes, signs = 2.0 ** rng.integers(-9, -7, (256, 512)), rng.choice([-1, 1], (256, 512))
    g = {"w": jnp.asarray(sizes * signs, BF16)}
    params, state = lowmem.init(tx, masters, BF16)
    same_bits = functools.partial(jax.jit, compiler_options=SAME_BITS)
    one = same_bits(functools.partial(lowmem.step, tx, **ON_TPU))(g, state, params)
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    place = {"w": NamedSharding(mesh, spec)}
    of_state = state_shardings(tx, params, place)
    step = functools.partial(lowmem.step, tx, specs={"w": spec}, mesh=mesh, **ON_TPU)
    placed = [jax.device_put(x, s) for x, s in ((g, place), (state, of_state), (params, place))]
    compiled = same_bits(step, out_shardings=(place, of_state)).lower(*placed).compile()
    several = compiled(*placed)
    found = set(re.findall(COLLECTIVES, compiled.as_text()))
    if name != "a mean":
        assert found <= collectives
        jax.tree.map(np.testing.assert_array_equal, several, one)
        return
    assert found == collectives
    (params, state), (own, own_state) = several, one
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(own_state), strict=True):
        near = np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)) <= 1
        share = np.mean(np.asarray(a) != np.asarray(b))
        # codes of moments do not depend on the mean; the correction of a weight does
        assert near.all() or share <= tolerances.REORDERED_CODES
    np.testing.assert_allclose(
        np.asarray(params["w"], np.float32), np.asarray(own["w"], np.float32), rtol=2.0**-8
    )
