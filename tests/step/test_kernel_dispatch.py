"""Tests of the kernel chosen per leaf and its reason, of shared launches and of tilings."""

import dataclasses
import functools
import json
from importlib import resources

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_lowmem as lowmem
from optax_lowmem._src.arrays.groups import Tile
from optax_lowmem._src.kernels import partitioned, platform, step_arguments
from optax_lowmem._src.optim import step as fused_update
from optax_lowmem._src.optim.step import backend, gpu, tuning
from optax_lowmem._src.optim.step.state import Leaf, LeafBatch
from tests.lowering import gpu_mesh, kernels_in, lower_for_cuda

STORAGE = lowmem.Storage(policy=lowmem.Policy(min_size=0))
TX = lowmem.flash_adamw(1e-3, storage=STORAGE)
BF16, F32 = jnp.bfloat16, jnp.float32


def plan_of(shape, tx=TX, dtype=BF16, path="block/w"):
    (plan,) = tx.engine.plans({path: jax.ShapeDtypeStruct(shape, dtype)})
    return plan


def choose(shape, implementation=None, tx=TX):
    return backend.choose(tx.engine.rule, plan_of(shape, tx), implementation)


# ---- who takes a leaf ----------------------------------------------------------------------------
TOO_MANY = (1 << 16, 1 << 15)
IN_F32 = lowmem.flash_adamw(1e-3, storage=lowmem.Storage(mu=None, nu=None))


@pytest.mark.parametrize(
    "shape, tx, chosen, reason",
    [
        ((64, 128), TX, "pallas", "fused kernel"),
        ((3,), TX, "pallas", "fused kernel"),
        ((2**15, 2**16 - 1), TX, "pallas", "fused kernel"),
        (TOO_MANY, TX, "xla", "2147483648 elements, more than a kernel's 32-bit offsets reach"),
        ((), TX, "xla", "a 0-d or empty leaf has no tiles"),
        ((0, 4), TX, "xla", "a 0-d or empty leaf has no tiles"),
        ((1 << 16,), IN_F32, "pallas", "fused kernel"),
        ((1 << 16, 2), IN_F32, "xla", "no slot is compressed: plain elementwise work"),
    ],
)
def test_who_takes_a_leaf(on_a_gpu, shape, tx, chosen, reason, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    name, why = choose(shape, tx=tx)
    assert name == chosen and reason in why
    assert choose(shape, "xla", tx) == ("xla", "asked for")


def test_a_large_leaf_on_a_machine_with_several_gpus(on_a_gpu, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    name, why = choose(TOO_MANY)
    assert name == "pallas" and "fused kernel for shards of up to 2147483647 elements" in why
    monkeypatch.setattr(partitioned, "available", lambda: False)
    assert choose(TOO_MANY)[0] == "xla"


def test_the_second_backend(on_a_gpu, monkeypatch):
    """Without Pallas' Triton lowering and jax-triton, XLA is chosen and both reasons are given."""
    monkeypatch.setattr(platform, "has_pallas_triton", lambda: False)
    monkeypatch.setattr(platform, "has_jax_triton", lambda: False)
    name, why = choose((64, 128))
    assert name == "xla" and "pallas: this JAX has no Pallas-Triton lowering" in why
    assert "triton: jax-triton is not installed (pip install jax-triton)" in why
    with pytest.raises(ValueError, match=r"jax-triton is not installed \(pip install"):
        choose((64, 128), "triton")


WIDE = lowmem.flash_adamw(1e-3, storage=dataclasses.replace(STORAGE, group_size=1 << 17))


def test_the_second_backend_and_its_reasons(on_a_gpu, monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setattr(platform, "has_jax_triton", lambda: True)
    with pytest.raises(ValueError, match="'triton' cannot take leaf 'block/w': groups of 131072"):
        choose((2, 1 << 17), "triton", WIDE)
    assert choose((64, 128), "triton") == ("triton", "asked for")
    monkeypatch.setattr(platform, "has_pallas_triton", lambda: False)
    assert choose((64, 128)) == (
        "triton",
        "fused kernel; pallas: this JAX has no Pallas-Triton lowering",
    )
    assert "triton: groups of 131072" in choose((2, 1 << 17), tx=WIDE)[1]


@pytest.mark.parametrize("kernel", ["pallas", "triton"])
def test_a_kernel_that_cannot_be_had(kernel):
    """The error has the leaf, the reason and the way out; here there is no GPU."""
    if jax.default_backend() == "gpu":
        pytest.skip("there is a GPU")
    params = {"block": {"w": jnp.ones((64, 128), BF16)}}
    message = rf"implementation='{kernel}' cannot take leaf 'block/w': the default backend is cpu"
    with pytest.raises(ValueError, match=rf"{message}.*Pass implementation=None"):
        lowmem.step(TX, params, TX.init(params), params, implementation=kernel)


def test_a_leaf_that_a_kernel_cannot_take(on_a_gpu):
    with pytest.raises(ValueError, match="'pallas' cannot take leaf 'block/w': 2147483648 elem"):
        choose(TOO_MANY, "pallas")


@pytest.mark.parametrize(
    "shape, tx, chosen",
    [((), TX, "xla"), ((0, 4), TX, "xla"), ((1 << 16, 2), IN_F32, "xla"), ((64,), TX, "pallas")],
)
def test_what_is_asked_for(on_a_gpu, shape, tx, chosen):
    """A leaf without codes goes where it is fastest, whatever is asked for: nothing is lost."""
    assert choose(shape, "pallas", tx)[0] == chosen


def test_several_devices(on_a_gpu, monkeypatch):
    """Where JAX sees several, the program decides: what XLA takes is named in what it compiles."""
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    assert choose((64, 128)) == ("pallas", "fused kernel")
    params = {"w": jnp.ones((64, 128), BF16)}
    assert "fused kernel; on several devices as lowmem.imp" in str(lowmem.explain(TX, params))
    state, mesh = TX.init(params), gpu_mesh(data=8)
    step = functools.partial(lowmem.step, TX)
    assert kernels_in(lower_for_cuda(step, params, state, params, mesh=mesh)) == ["fused_update"]
    monkeypatch.setattr(partitioned, "available", lambda: False)
    sharding = jax.NamedSharding(mesh, P())
    args = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), (params, state, params)
    )
    assert kernels_in(lower_for_cuda(step, *args, mesh=mesh)) == []


def test_inside_a_shard_map(on_a_gpu, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    mesh = gpu_mesh(data=8)
    params = {"w": jax.ShapeDtypeStruct((16, 64), BF16)}
    state = jax.eval_shape(TX.init, params)

    def spec(x):
        return P("data") if x.ndim else P()

    specs = [jax.tree.map(spec, tree) for tree in (params, state, params)]
    for check in (True, False):
        step = jax.shard_map(
            functools.partial(lowmem.step, TX),
            mesh=mesh,
            in_specs=tuple(specs),
            out_specs=(specs[0], specs[1]),
            check_vma=check,
        )
        text = lower_for_cuda(step, params, state, params, mesh=mesh)
        assert kernels_in(text) == ["fused_update"], check


def test_explicit_axes(on_a_gpu):
    """A kernel would gather the array: XLA's path keeps its sharding."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Explicit,))
    params = {"w": jnp.ones((16, 64), BF16)}
    params = jax.device_put(params, jax.NamedSharding(mesh, P("data")))
    reason = backend.choose(TX.engine.rule, plan_of((16, 64)), None, params["w"])
    assert reason == ("xla", "it is on Explicit mesh axes, outside of a shard_map")
    with pytest.raises(ValueError, match="cannot take leaf 'block/w'.*Explicit mesh axes"):
        backend.choose(TX.engine.rule, plan_of((16, 64)), "pallas", params["w"])
    with jax.set_mesh(mesh):
        new, state = jax.jit(functools.partial(lowmem.step, TX))(params, TX.init(params), params)
    for x in (new["w"], state.mu["w"], state.mu_scale["w"]):
        assert jax.typeof(x).sharding.spec == P("data", None)


def test_explain_says_it(on_a_gpu):
    params = {"w": jnp.ones((64, 128), BF16), "big": jax.ShapeDtypeStruct(TOO_MANY, BF16)}
    lines = str(lowmem.explain(TX, params)).splitlines()
    assert any("pallas updates 1 of 2 leaves: fused kernel" in line for line in lines)
    assert any("xla updates 1 of 2 leaves: pallas: 2147483648" in line for line in lines)


@pytest.mark.parametrize("kernel", fused_update.IMPLEMENTATIONS)
def test_a_computation_for_a_cpu_on_a_gpu_machine(on_a_gpu, kernel):
    params = jax.device_put({"w": jnp.ones((7, 40), BF16)}, jax.local_devices(backend="cpu")[0])
    grads, state = jax.tree.map(lambda p: p * 0.01, params), TX.init(params)
    implementation = "xla" if kernel == "xla" else None
    run = functools.partial(lowmem.step, TX, implementation=implementation)
    new, new_state = jax.jit(run)(grads, state, params)
    assert (new_state.correction["w"] != 0).any() and (new["w"] <= params["w"]).all()
    text = lower_for_cuda(functools.partial(run), grads, state, params)
    assert kernels_in(text) == ([] if kernel == "xla" else ["fused_update"])


# ---- who shares a launch -------------------------------------------------------------------------
def batches(*leaves, direct=True, **tuned):
    """Of (shape, options of `plan_of`, gradient's dtype) each, all taken."""
    plans = [plan_of(shape, **how) for shape, how, _ in leaves]
    rows = [
        (
            dataclasses.replace(plan, returns_params=direct),
            jax.ShapeDtypeStruct(plan.shape, dtype),
            jax.ShapeDtypeStruct(plan.shape, plan.dtype),
        )
        for plan, (_, _, dtype) in zip(plans, leaves, strict=True)
    ]
    return indices_of_launches(rows, **{"leaves": 8, **tuned})


def indices_of_launches(rows, **tuned):
    """Of (plan, gradient, weight) each."""
    plans, *arrays = zip(*rows, strict=True)
    batch = LeafBatch.of(plans, list(map(Leaf, *arrays)), {}, None)
    return gpu.group_leaves(batch, tuning.Tuning(**tuned))


def plain(*shape):
    return shape, {}, BF16


def test_leaves_of_a_kind_share_a_launch():
    assert batches(plain(64), plain(3, 40), plain(7, 7, 32)) == [[0, 1, 2]]
    assert batches(plain(64), plain(64, 3), plain(32)) == [[0, 2], [1]]  # 3 lie in 4 lanes
    other = {
        "gradient": ((64,), {}, F32),
        "weight": ((64,), {"dtype": F32}, BF16),
        "codec": ((64,), {"tx": lowmem.flash_adamw(1e-3, storage=lowmem.Storage())}, BF16),
        "split": (
            (64,),
            {"tx": lowmem.flash_adamw(1, storage=dataclasses.replace(STORAGE, split="ulp"))},
            BF16,
        ),
    }
    for name, leaf in other.items():
        assert batches(plain(64), leaf, plain(32)) == [[0, 2], [1]], name
    plan = plan_of((64,))
    plans = plan, dataclasses.replace(plan, decays=False)
    rows = [(plan, jnp.ones(64), jnp.ones(64, BF16)) for plan in plans]
    assert indices_of_launches(rows) == [[0], [1]]


def test_most_leaves_of_a_launch():
    found = batches(*[plain(64)] * 5, plain(64, 3), *[plain(64)] * 2, leaves=3)
    assert found == [[0, 1, 2], [3, 4, 6], [7], [5]]
    assert batches(*[plain(64)] * 3, leaves=1) == [[0], [1], [2]]


def test_launches_of_many_layers_compile_once():
    """Shapes of one number of leaves share launches; what is left goes with its neighbours."""
    layer = [plain(96, 32), plain(64), plain(32, 96), plain(64)]
    first, last = plain(500, 32), plain(64)
    found = batches(first, *layer * 10, last, leaves=4)
    shapes = [[[first, *layer * 10, last][i][0] for i in part] for part in found]
    assert shapes[:5] == [[(96, 32)] * 2 + [(32, 96)] * 2] * 5 and shapes[5:10] == [[(64,)] * 4] * 5
    assert shapes[10:] == [[(500, 32), (64,)]]
    assert found[0] == [1, 5, 3, 7] and found[5] == [2, 4, 6, 8] and found[10] == [0, 41]
    assert sorted(i for part in found for i in part) == list(range(42))
    # of three shapes, which leave no room for more, one leaf each; the last three for themselves
    layer = [plain(96, 32), plain(32, 96), plain(7, 32)]
    assert batches(*layer * 9, leaves=5) == [[i, i + 1, i + 2] for i in range(0, 27, 3)]
    assert batches(*layer * 3, leaves=6) == [[*range(6)], [6, 7, 8]]
    size = 96 * 32
    assert batches(*layer * 4, elements=size) == [[0], [3], [6], [9], [1], [4], [7], [10]] + [
        [2, 5, 8, 11]
    ]


def test_most_elements_of_a_launch():
    sizes = [plain(100), plain(100), plain(20), plain(500), plain(50), plain(50)]
    assert batches(*sizes, elements=149) == [[0], [1], [2], [3], [4, 5]]
    assert batches(*sizes, elements=150) == [[0, 4], [1, 5], [2], [3]]
    assert batches(*sizes, elements=1000) == [[0, 1, 2, 3, 4, 5]]
    few = [plain(100), plain(99), plain(20), plain(500), plain(50)]
    assert batches(*few, elements=218) == [[0, 1], [2], [3], [4]]
    assert batches(*few, elements=219) == [[0, 1, 2], [3], [4]]


def test_an_update_holds_no_more_than_its_largest_leaf_in_f32():
    """The new weights of a launch, of 2 bytes, or its updates, of 4."""
    unit = 1 << 18
    sizes = [plain(2 * unit), plain(2 * unit), plain(unit), plain(3 * unit), plain(unit)]
    assert batches(*sizes) == [[0, 1, 2, 3, 4]]
    assert batches(*sizes, direct=False) == [[0, 1, 2], [3, 4]]
    in_f32 = [(shape, {"dtype": F32}, BF16) for shape, _, _ in sizes]
    assert batches(*in_f32, direct=False) == [[0, 2], [1, 4], [3]]
    assert batches(*sizes, direct=False, elements=4 * unit) == [[0, 2], [1, 4], [3]]
    # 1 MB is nothing
    assert batches(*[plain(unit // 8)] * 16, direct=False, leaves=99) == [[*range(16)]]
    assert len(batches(*[plain(unit // 8)] * 17, direct=False, leaves=99)) == 2


# ---- how the work is cut -------------------------------------------------------------------------
TUNED = [tuning.Tuning(Tile(64 << i, 1 << i), i + 1, 1000 + i) for i in range(4)]


def test_argument_then_trial_then_tuned_then_heuristic(monkeypatch):
    argument, trial, tuned, other = TUNED
    kind = jax.local_devices()[0].device_kind
    lines = {"pallas/2-slots": tuning.entry(tuned), "triton/1-slots": tuning.entry(other)}
    monkeypatch.setattr(tuning, "_tuned", lambda: {kind: lines, "another": {}})
    with step_arguments.stepping(tuning=trial):
        assert tuning.resolve(argument, "pallas", 2, 32) == argument
        assert tuning.resolve(None, "pallas", 2, 32) == trial
        with step_arguments.stepping(tuning=argument):
            assert tuning.resolve(None, "pallas", 1, 32) == argument
        assert tuning.resolve(None, "pallas", 1, 32) == trial
    assert tuning.resolve(None, "pallas", 2, 32) == tuned
    assert tuning.resolve(None, "triton", 1, 32) == other
    assert tuning.resolve(None, "pallas", 1, 32) == tuning.HEURISTIC == tuning.Tuning()
    # a generated kernel has one copy of the step, so that more leaves cost it no compile time
    own = tuning.resolve(None, "triton", 2, 32)
    assert own.leaves > tuning.HEURISTIC.leaves and own.tile == tuning.HEURISTIC.tile
    assert tuning.resolve(None, "pallas", 2, 128) == tuning.HEURISTIC_WIDE
    monkeypatch.setattr(tuning, "_tuned", lambda: {"another": lines})
    assert tuning.resolve(None, "pallas", 2, 32) == tuning.HEURISTIC


def test_a_trial_reaches_the_step(on_a_gpu):
    shapes = {f"w{i}": jax.ShapeDtypeStruct((4, 64), BF16) for i in range(4)}
    state = jax.eval_shape(TX.init, shapes)
    for leaves, count in ((1, 4), (2, 2), (4, 1)):
        with step_arguments.stepping(tuning=tuning.Tuning(leaves=leaves)):
            text = lower_for_cuda(functools.partial(lowmem.step, TX), shapes, state, shapes)
        assert sum("@launch" in line and "call" in line for line in text.splitlines()) == count


@pytest.mark.parametrize("tuned", TUNED, ids=str)
def test_an_entry_is_read_as_it_was_written(tuned):
    written = json.loads(json.dumps(tuning.entry(tuned)))
    assert tuning.parse(written) == tuned


def test_the_packaged_entries():
    tuning._tuned.cache_clear()
    text = resources.files(fused_update).joinpath("tuned.json").read_text(encoding="utf-8")
    assert tuning._tuned() == json.loads(text)
    for device, lines in tuning._tuned().items():
        for key, line in lines.items():
            kernel, slots, *wide = key.split("/")
            assert kernel in ("pallas", "triton") and slots in ("0-slots", "1-slots", "2-slots")
            assert wide in ([], ["wide"])
            cut = tuning.parse(line)
            source = line["source"]
            assert "commit" in source and {**tuning.entry(cut), "source": source} == line, key
            for power in (cut.tile.elements, cut.tile.warps):
                assert power > 0 and power & (power - 1) == 0, (device, key)
            assert cut.leaves >= 1 and cut.elements >= 1
