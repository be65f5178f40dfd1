"""Checkpoints: bit for bit on any mesh, and an error where they would be read as something else."""

import dataclasses
import functools
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import optax_lowmem as lowmem
from optax_lowmem import checkpoint
from optax_lowmem._src.optim import context
from optax_lowmem._src.training.checkpoint import store
from tests import contract_cases as cases
from tests.checkpoint_cases import (
    SMALL,
    abstract,
    adamw,
    assert_same_bits,
    mesh_of,
    scrambled,
    two_steps,
)
from tests.compilation import SAME_BITS
from tests.tiers import rows

# of a read that failed, tensorstore's other reads end after Orbax has closed its event loop
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
P = PartitionSpec
PAPER = lowmem.Storage.paper(policy=cases.POLICY, master_weight_bits=32)


def made(name, **form):
    return cases.CASES[name].make(1e-2, cases.Form(**form))


def stepping(tx):
    """Every step of a stream as one scan, compiled once for arrays of the same shapes."""

    def run(params, state, gradients):
        step = lambda carry, g: (lowmem.step(tx, g, carry[1], carry[0]), None)  # noqa: E731
        return jax.lax.scan(step, (params, state), gradients)[0]

    return jax.jit(run, compiler_options=SAME_BITS)


def trained(tx, steps=3, dtype=jnp.bfloat16):
    """Weights and state after some steps, compiled once, and what takes further ones."""
    params, state = lowmem.init(tx, cases.masters(), dtype)
    gradients = cases.stream(params, 2 * steps)

    run = stepping(tx)

    def part(of):
        return jax.tree.map(lambda g: g[of], gradients)

    params, state = run(params, state, part(slice(steps)))
    return params, state, lambda p, s: run(p, s, part(slice(steps, None)))


# ---- there and back -----------------------------------------------------------------------------
def test_save_writes_2_gb_at_a_time_or_the_largest_shard(tmp_path, monkeypatch):
    limits = []

    class Handler(ocp.StandardCheckpointHandler):
        def __init__(self, *, save_concurrent_gb):
            limits.append(save_concurrent_gb)
            super().__init__(save_concurrent_gb=save_concurrent_gb)

    monkeypatch.setattr(ocp, "StandardCheckpointHandler", Handler)
    tx = adamw()
    params, state = lowmem.init(tx, {"w": jnp.ones((64, 64))})
    checkpoint.save(tmp_path, tx, params, state, step=1)
    with monkeypatch.context() as patch:
        patch.setattr(store, "_shard_bytes", lambda array: 5 * 10**9)
        checkpoint.save(tmp_path, tx, params, state, step=2)
    assert limits == [2, 2, 6, 6]  # of weights, of the state
    sharded = jax.device_put(params["w"], NamedSharding(mesh_of(a=8), P("a")))
    sizes = map(store._shard_bytes, (params["w"], sharded, np.ones(3), jax.random.key(0)))
    assert list(sizes) == [64 * 64 * 2, 8 * 64 * 2, 24, 8]


@pytest.mark.parametrize("name", rows(lowmem.OPTIMIZERS, ["coat_adamw", "q_adam_mini"]))
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(name, tmp_path):
    tx = made(name)
    params, state, go_on = trained(tx)
    checkpoint.save(tmp_path, tx, params, state, step=3)
    restored = checkpoint.restore(tmp_path, tx, abstract(params))
    assert_same_bits(restored, (params, state))
    assert_same_bits(go_on(*restored), go_on(params, state))


@pytest.mark.parametrize(
    "name", rows(["optax.adan", "optax.amsgrad", "optax.adan-int4"], ["optax.adan-int4"])
)
def test_compressed_state_comes_back(name, tmp_path):
    tx = made(name)
    params, state = lowmem.init(tx, cases.masters())
    state = scrambled(state)
    checkpoint.save(tmp_path, tx, params, state, step=0)
    assert_same_bits(checkpoint.restore(tmp_path, tx, abstract(params)), (params, state))


def wrapped(kind):
    tx = lowmem.flash_adamw(1e-3, storage=SMALL)
    return {
        "chain": lambda: lowmem.chain(optax.clip_by_global_norm(1.0), tx),
        "masked": lambda: optax.masked(tx, {"block": {"w": True}, "norm": False}),
        "partition": lambda: optax.partition(
            {"ours": tx, "plain": optax.sgd(1e-3)}, {"block": {"w": "ours"}, "norm": "plain"}
        ),
        "MultiSteps": lambda: optax.MultiSteps(tx, 2).gradient_transformation(),
        "inject": lambda: optax.inject_hyperparams(
            lowmem.flash_adamw, static_args="storage", hyperparam_dtype=jnp.float32
        )(1e-3, storage=SMALL),
        "accumulate": lambda: lowmem.accumulate_gradients(tx, 2, "bfloat16"),
        "ema": lambda: lowmem.track_master_ema(tx, 0.9),
        "split": lambda: lowmem.split_master_weights(optax.adamw(1e-3)),
        "direction": lambda: lowmem.scale_by_flash_adam(storage=SMALL),
        "optax": lambda: optax.adamw(1e-3),
    }[kind]()


WRAPPERS = ("chain", "masked", "partition", "MultiSteps", "inject", "accumulate", "ema", "split",
            "direction", "optax")  # fmt: skip


@pytest.mark.parametrize("kind", WRAPPERS)
def test_states_inside_wrappers_come_back(kind, tmp_path):
    tx = wrapped(kind)
    params, state = lowmem.init(tx, cases.masters(), allow_rounding=True)
    state = scrambled(state)
    checkpoint.save(tmp_path, tx, params, state, step=0)
    assert_same_bits(checkpoint.restore(tmp_path, tx, params), (params, state))


def four_bits(learning_rate, storage=None):
    """Two codes in a byte."""
    four = lowmem.Storage.four_bit()
    chosen = dataclasses.replace(storage or lowmem.Storage(), mu=four.mu, nu=four.nu)
    return lowmem.flash_adamw(learning_rate, storage=chosen)


@pytest.mark.parametrize("storage", [SMALL, pytest.param(PAPER, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "make",
    [
        lowmem.flash_adamw,
        pytest.param(lowmem.coat_adamw, marks=pytest.mark.full),
        pytest.param(lowmem.q_adamw, marks=pytest.mark.full),
        pytest.param(four_bits, marks=pytest.mark.full),
    ],
)
def test_onto_another_mesh(make, storage, tmp_path):
    codecs = make(1e-3).engine.storage
    paper = storage if storage is not SMALL else codecs
    tx = make(1e-3, storage=dataclasses.replace(storage, mu=paper.mu, nu=paper.nu))
    params, state = lowmem.init(tx, {"w": jnp.ones((8, 96)), "b": jnp.ones(8)})
    params, state = scrambled(params), scrambled(state)
    # numbers: an older XLA, as these tests compile, moves 16-bit NaN between devices through f32
    params = jax.tree.map(jnp.nan_to_num, params)
    wide = NamedSharding(mesh_of(a=4, b=2), P("a"))
    laid_out = jax.tree.map(spread, (params, state), everywhere(params, state, wide))
    checkpoint.save(tmp_path, tx, *laid_out, 1)

    few = NamedSharding(mesh_of(a=2), P(None, "a"))
    like = {**abstract(params), "w": jax.ShapeDtypeStruct((8, 96), jnp.bfloat16, sharding=few)}
    new, restored = checkpoint.restore(tmp_path, tx, like)
    assert_same_bits((new, restored), (params, state))
    assert new["w"].sharding == restored.mu["w"].sharding == few
    assert restored.mu_scale["w"].sharding.is_fully_replicated
    assert restored.count.sharding.device_set == few.device_set

    narrow = NamedSharding(mesh_of(a=2), P("a"))
    shardings = everywhere(params, state, narrow)[1]
    _, restored = checkpoint.restore(tmp_path, tx, like, shardings=shardings)
    assert_same_bits(restored, state)
    assert restored.nu_scale["w"].sharding == narrow

    replicated = NamedSharding(mesh_of(a=2), P())
    _, restored = checkpoint.restore(tmp_path, tx, like, shardings=replicated)
    assert_same_bits(restored, state)


def test_codes_that_share_bytes_lie_as_their_parameter():
    """Of abstract parameters, where parts are whole bytes; nothing is written."""
    few = NamedSharding(mesh_of(a=2), P(None, "a"))
    for columns, codes in ((96, P(None, "a")), (94, P(None, None))):  # 48 bytes, and 47
        like = {"w": jax.ShapeDtypeStruct((64, columns), jnp.bfloat16, sharding=few)}
        state, decisions = context.dry_run(four_bits(1e-3), like)
        _, found = store.targets(like, state, None, decisions)
        assert found.mu["w"].sharding.spec == found.nu["w"].sharding.spec == codes
        assert found.correction["w"].sharding == few


def spread(x, sharding):
    """By no program: one that is quickly compiled makes signalling NaNs quiet."""
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def everywhere(params, state, sharding):
    """Rows of what has 8 of them over the mesh, the rest on all of it."""
    replicated = NamedSharding(sharding.mesh, P())
    pick = lambda x: sharding if x.shape[:1] == (8,) else replicated  # noqa: E731
    return jax.tree.map(pick, (params, state))


def test_a_run_that_moves_to_another_mesh_keeps_its_bits(tmp_path):
    """100 steps, stopped at 50, stochastic rounding and all."""
    tx = lowmem.flash_adamw(1e-2, storage=SMALL)
    start = {"w": cases.masters()["block"]["w"][:2, :32].repeat(4, 0).repeat(3, 1)}
    params, state = lowmem.init(tx, start)
    gradients = cases.stream(params, 50)
    run = functools.partial(stepping(tx), gradients=gradients)

    whole = run(*run(params, state))
    wide = NamedSharding(mesh_of(a=4, b=2), P("a"))
    half = run(*jax.device_put((params, state), everywhere(params, state, wide)))
    assert len(half[1].mu["w"].sharding.device_set) == 8
    checkpoint.save(tmp_path, tx, *half, step=50)
    few = NamedSharding(mesh_of(a=2), P("a"))
    like = {"w": jax.ShapeDtypeStruct((8, 96), jnp.bfloat16, sharding=few)}
    assert_same_bits(run(*checkpoint.restore(tmp_path, tx, like)), whole)


# ---- interrupted and damaged --------------------------------------------------------------------
def test_a_step_that_was_being_written_is_ignored(tmp_path):
    """As Orbax leaves it: under another name, with some of its files."""
    tx, first, second = two_steps(tmp_path)
    (tmp_path / "2").rename(tmp_path / "2.orbax-checkpoint-tmp")
    next((tmp_path / "2.orbax-checkpoint-tmp" / "opt_state").rglob("d/*")).unlink()
    assert checkpoint.latest_step(tmp_path) == 1
    assert_same_bits(checkpoint.restore(tmp_path, tx, first[0]), first)
    checkpoint.save(tmp_path, tx, *second, step=2)
    assert_same_bits(checkpoint.restore(tmp_path, tx, first[0]), second)


@pytest.mark.full
def test_a_killed_save_leaves_the_step_before(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(f"""
import os, signal, jax.numpy as jnp, orbax.checkpoint as ocp, optax_lowmem as lowmem
tx = lowmem.flash_adamw(1e-3)
params, state = lowmem.init(tx, {{"w": jnp.full((2000, 4000), 0.1)}})
lowmem.checkpoint.save({str(tmp_path / "ck")!r}, tx, params, state, step=1)
manager = ocp.CheckpointManager({str(tmp_path / "ck")!r})
manager.save(2, args=ocp.args.Composite(**lowmem.checkpoint.args(tx, params, state)))
os.kill(os.getpid(), signal.SIGKILL)  # while a thread writes the files
""")
    repo = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": str(repo), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, script], env=env, timeout=300, check=False)
    assert done.returncode == -signal.SIGKILL
    assert sorted(p.name for p in (tmp_path / "ck").iterdir()) == ["1", "2.orbax-checkpoint-tmp"]
    tx = lowmem.flash_adamw(1e-3)
    params, state = lowmem.init(tx, {"w": jnp.full((2000, 4000), 0.1)})
    assert checkpoint.latest_step(tmp_path / "ck") == 1
    assert_same_bits(checkpoint.restore(tmp_path / "ck", tx, params), (params, state))


@pytest.mark.parametrize("item", ["params", "opt_state", "optax_lowmem"])
@pytest.mark.parametrize("damage", ["cut", "delete"])
def test_a_damaged_checkpoint_says_so(item, damage, tmp_path):
    tx, first, _ = two_steps(tmp_path)
    data = [p for p in (tmp_path / "2" / item).rglob("*") if p.is_file() and p.stat().st_size > 1]
    data = [p for p in data if p.parent.name == "d" or p.name == "metadata"]
    assert data
    for path in data:
        if damage == "cut":
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        else:
            path.unlink()
    with pytest.raises(ValueError, match=r"step 2 .* cannot be read: .* \(available: \[1, 2\]\)"):
        checkpoint.restore(tmp_path, tx, first[0])
    assert_same_bits(checkpoint.restore(tmp_path, tx, first[0], step=1), first)


def test_a_step_that_is_not_there(tmp_path):
    tx, (params, state), _ = two_steps(tmp_path)
    with pytest.raises(ValueError, match=r"no complete checkpoint of step 5; .* \[1, 2\]"):
        checkpoint.restore(tmp_path, tx, params, step=5)
    with pytest.raises(ValueError, match="no complete checkpoint; .*"):
        checkpoint.restore(tmp_path / "empty", tx, params)
    assert checkpoint.latest_step(tmp_path / "nowhere") is None
    for path in (3, None, tx):
        with pytest.raises(TypeError, match="path must be a directory.*, got"):
            checkpoint.latest_step(path)
    with pytest.raises(ValueError, match="has a checkpoint of step 2 already"):
        checkpoint.save(tmp_path, tx, params, state, step=2)


def test_keep_removes_old_steps(tmp_path):
    tx = lowmem.flash_lion(1e-3, storage=SMALL)
    params, state = lowmem.init(tx, cases.masters())
    for step in range(3):
        checkpoint.save(tmp_path, tx, params, state, step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


# ---- weights alone -------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("format", ["safetensors", "orbax"])
def test_export(dtype, format, tmp_path):
    from safetensors.numpy import load_file

    tx = adamw()
    mixed = cases.DTYPES["mixed"]
    params, state = lowmem.init(tx, cases.masters(), mixed)
    masters = lowmem.master_params(params, state)
    path = tmp_path / "weights"
    checkpoint.export(path, params, state, dtype, format=format)
    if format == "safetensors":
        found = load_file(path)
        assert sorted(found) == ["block.w", "norm"]
        found = {"block": {"w": found["block.w"]}, "norm": found["norm"]}
    else:
        found = ocp.StandardCheckpointer().restore(path)
    wanted = masters
    if dtype == jnp.bfloat16:  # the weight as it was trained, and the rounded f32 one
        wanted = {"block": params["block"], "norm": masters["norm"].astype(jnp.bfloat16)}
    assert_same_bits(jax.tree.map(jnp.asarray, found), wanted)


def test_export_refuses(tmp_path):
    params, state = lowmem.init(adamw(), cases.masters())
    with pytest.raises(TypeError, match="float32 or bfloat16, not int8"):
        checkpoint.export(tmp_path / "w", params, state, jnp.int8)
    with pytest.raises(ValueError, match="format must be one of"):
        checkpoint.export(tmp_path / "w", params, state, format="npz")
    params = {"a": {"b": jnp.ones(3)}, "a.b": jnp.ones(3)}
    with pytest.raises(ValueError, match="would both be called 'a.b'"):
        checkpoint.export(tmp_path / "w", params, {}, jnp.bfloat16)


# ---- size (FlashOptim, section 3.4) --------------------------------------------------------------
def test_bytes_a_parameter_on_disk(tmp_path):
    from benchmarks.suites import checkpoint as bench_checkpoint

    ours, plain = (bench_checkpoint.on_disk(impl, 1 << 18, tmp_path / impl[:5]) for impl in
                   ("lowmem", "optax-f32"))  # fmt: skip
    assert 5.1875 * 0.85 < ours < 5.1875 * 1.02
    assert 12 * 0.85 < plain < 12 * 1.02
