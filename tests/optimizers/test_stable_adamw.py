"""StableAdamW and update clipping: against float64, against optimi, and each against the other."""

import functools
import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import optax_lowmem as lowmem
from tests import tolerances
from tests.oracle import optimizers as oracle

F32_STATE = lowmem.Storage.full_precision(master_weight_bits=None)
HYPER = {"b1": 0.9, "b2": 0.99, "eps": 1e-6, "weight_decay": 1e-2}
GOLDEN = Path(__file__).parents[1] / "golden" / "optimi_stable_adamw.npz"
SHAPES = {"w": (24, 16), "b": (24,), "embedding": (50, 8)}


def stream(steps=20, seed=0):
    """Gradients whose size jumps by 100 at step 10, in one leaf: RMS_t is then near 10."""
    rng = np.random.default_rng(seed)
    for step in range(steps):
        scale = {"w": 100.0 if step >= 10 else 1.0}
        yield {
            name: (scale.get(name, 1.0) * 1e-2 * rng.normal(size=shape)).astype(np.float32)
            for name, shape in SHAPES.items()
        }


def parameters(seed=1):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def run(tx, grads, params, take_step=None):
    take_step = take_step or (
        lambda g, state, p: (lambda u: (optax.apply_updates(p, u[0]), u[1]))(tx.update(g, state, p))
    )
    params = jax.tree.map(jnp.asarray, params)
    state, step = tx.init(params), jax.jit(take_step)
    history = []
    for g in grads:
        params, state = step(g, state, params)
        history.append(params)
    return history


def by_oracle(grads, params, threshold=1.0, lr=1e-3, **changes):
    hyper = {**HYPER, **changes}
    history = []
    weights = {name: np.float64(p) for name, p in params.items()}
    moments = {name: (np.zeros(p.shape), np.zeros(p.shape)) for name, p in weights.items()}
    for t, g in enumerate(grads, 1):
        for name, w in weights.items():
            weights[name], *moments[name], _ = oracle.stable_adamw(
                w, np.float64(g[name]), *moments[name], t, lr=lr, threshold=threshold, **hyper
            )
        history.append(dict(weights))
    return history


def assert_follows(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        for name in SHAPES:
            np.testing.assert_allclose(
                one[name], other[name],
                rtol=tolerances.STABLE_ADAMW_RTOL, atol=tolerances.STABLE_ADAMW_ATOL,
            )  # fmt: skip


TXS = {
    "stable_adamw": functools.partial(lowmem.stable_adamw, storage=F32_STATE),
    "update_clipping": lambda lr, threshold=1.0, **hyper: lowmem.update_clipping(
        optax.adamw(lr, **hyper), b2=hyper["b2"], eps=hyper["eps"], threshold=threshold
    ),
}


@pytest.mark.parametrize("threshold", [1.0, 0.5, 4.0])
@pytest.mark.parametrize("name", TXS)
def test_is_algorithm_2(name, threshold):
    grads, params = list(stream()), parameters()
    tx = TXS[name](1e-3, threshold=threshold, **HYPER)
    assert_follows(run(tx, grads, params), by_oracle(grads, params, threshold))


def test_the_fused_step_is_algorithm_2():
    grads, params = list(stream()), parameters()
    tx = lowmem.stable_adamw(1e-3, storage=F32_STATE, **HYPER)
    found = run(tx, grads, params, functools.partial(lowmem.step, tx))
    assert_follows(found, by_oracle(grads, params))


def test_the_oracle_clips_where_it_should():
    """A hundredfold gradient after ten steps: RMS_t = sqrt((1 - b2^11) / (1 - b2)) = 3.2."""
    grads, params = list(stream()), parameters()
    plain = by_oracle(grads, params, threshold=1e9)
    clipped = by_oracle(grads, params)
    ratio = (
        np.abs(clipped[10]["w"] - clipped[9]["w"]).max()
        / np.abs(plain[10]["w"] - plain[9]["w"]).max()
    )
    assert 0.25 < ratio < 0.4


def by_optimi(grads, params):
    """Weights after each step of optimi's StableAdamW, in torch."""
    import optimi
    import torch

    weights = {name: torch.nn.Parameter(torch.tensor(p)) for name, p in params.items()}
    tx = optimi.StableAdamW(
        weights.values(), lr=1e-3, betas=(0.9, 0.99), eps=1e-6, weight_decay=1e-2, foreach=False
    )
    history = []
    for g in grads:
        for name, w in weights.items():
            w.grad = torch.tensor(g[name])
        tx.step()
        history.append({name: w.detach().numpy().copy() for name, w in weights.items()})
    return history


@pytest.mark.parametrize("name", TXS)
def test_optimis_stored_weights(name):
    """Of optimi 0.3.3 on torch 2.15: the history of `by_optimi`, leaf/step."""
    grads, params = list(stream()), parameters()
    stored = np.load(GOLDEN)
    history = [{leaf: stored[f"{leaf}/{t}"] for leaf in SHAPES} for t in range(len(grads))]
    assert_follows(run(TXS[name](1e-3, **HYPER), grads, params), history)


def test_optimi_is_the_same():
    if not all(map(importlib.util.find_spec, ("optimi", "torch"))):
        pytest.skip("optimi and torch are not installed (pip install torch-optimi==0.3.3)")
    grads, params = list(stream()), parameters()
    ours = lowmem.stable_adamw(1e-3, storage=F32_STATE, **HYPER)
    assert_follows(run(ours, grads, params), by_optimi(grads, params))


def test_zero_gradients_and_eps_in_f16():
    """0 / max(0, eps^2): nothing moves but by decay, and eps^2 is not taken in f16."""
    zeros = [{name: np.zeros(shape, np.float16) for name, shape in SHAPES.items()}] * 3
    params = {name: p.astype(np.float16) for name, p in parameters().items()}
    for name in TXS:
        tx = TXS[name](1e-3, **{**HYPER, "weight_decay": 0.0})
        for name, p in run(tx, zeros, params)[-1].items():
            np.testing.assert_array_equal(p, params[name])
    # one exact zero among gradients of 1: the RMS is a number, and clips
    ones = {name: np.ones(shape, np.float16) for name, shape in SHAPES.items()}
    ones["w"][0, 0] = 0
    tx = TXS["stable_adamw"](1e-3, threshold=0.5, **{**HYPER, "weight_decay": 0.0})
    moved = run(tx, [ones], parameters())[0]["w"] - parameters()["w"]
    assert 0.4e-3 < float(jnp.abs(moved[0, 1])) < 0.6e-3


@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.parametrize("name", TXS)
def test_what_is_not_finite_stays_in_its_tensor(name, bad):
    grads = {key: np.ones(shape, np.float32) for key, shape in SHAPES.items()}
    grads["w"][3, 5] = bad
    found = run(TXS[name](1e-3, **HYPER), [grads], parameters())[0]
    assert np.isnan(found["w"]).any()
    assert np.isfinite(found["b"]).all() and np.isfinite(found["embedding"]).all()


def test_on_a_mesh_the_mean_is_of_the_whole_leaf():
    tx = lowmem.stable_adamw(1e-3, storage=F32_STATE, **HYPER)
    params = {"w": jnp.ones((16, 8))}
    grads = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(16, 8)), jnp.float32)}
    grads["w"] = grads["w"].at[:2].mul(100)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    state = tx.init(params)
    state = tx.update(jax.tree.map(lambda g: 0.1 * g, grads), state, params)[1]
    step = functools.partial(lowmem.step, tx)
    specs = jax.tree.map(lambda x: P("data") if jnp.ndim(x) > 1 else P(), (grads, state, params))
    for check in (True, False):
        sharded = jax.shard_map(
            step, mesh=mesh, in_specs=specs, out_specs=(specs[2], specs[1]), check_vma=check
        )
        if not check:
            with pytest.raises(ValueError, match="check_vma=True"):
                jax.jit(sharded)(grads, state, params)
            continue
        wanted, found = jax.jit(step)(grads, state, params), jax.jit(sharded)(grads, state, params)
        np.testing.assert_allclose(found[0]["w"], wanted[0]["w"], rtol=1e-6)


def test_a_schedule_of_b2():
    """Both ways, with 1 - t^-0.8: the weights of the average sum to 1, and nothing is debiased."""
    hyper = {**HYPER, "b2": lowmem.b2_schedule()}
    grads, params = list(stream()), parameters()
    ours = lowmem.stable_adamw(1e-3, storage=F32_STATE, **hyper)
    moments = lowmem.flash_adamw(1e-3, storage=F32_STATE, **hyper)
    history = run(ours, grads, params)
    clipped = np.abs(np.asarray(history[10]["w"] - history[9]["w"])).max()
    plain = run(moments, grads, params)
    assert clipped < 0.5 * np.abs(np.asarray(plain[10]["w"] - plain[9]["w"])).max()
    with pytest.raises(ValueError, match="b2"):
        lowmem.update_clipping(optax.adamw(1e-3), b2=lambda t: 0.9, eps=1e-8)


def test_misuse():
    with pytest.raises(ValueError, match="threshold must be > 0"):
        lowmem.stable_adamw(1e-3, threshold=0)
    with pytest.raises(ValueError, match="threshold must be > 0"):
        lowmem.update_clipping(optax.adamw(1e-3), b2=0.999, eps=1e-8, threshold=0.0)
    params = {"w": jnp.ones((64, 64), jnp.bfloat16)}
    wrapped = {
        "splits master weights": lowmem.flash_adamw(1e-3),
        "one second moment.*has 0": optax.sgd(0.1, momentum=0.9),
        "one second moment.*another form.*clip_by_block_rms": lowmem.scale_by_factored_adam(),
        "one second moment.*has 2": optax.chain(optax.scale_by_adam(), optax.scale_by_rms()),
        "'w' is stored as uint8 codes": lowmem.compress_state(
            optax.adamw(1e-3), nu=lowmem.codecs.sqrt()
        ),
    }
    for message, inner in wrapped.items():
        with pytest.raises(ValueError, match=message):
            lowmem.update_clipping(inner, b2=0.999, eps=1e-8).init(params)
    with pytest.raises(ValueError, match="needs the whole gradient at once"):
        lowmem.accumulate_gradients(lowmem.stable_adamw(1e-3), 2, into="moments").init(params)


def test_inside_the_split_around_compression_and_masks():
    """The composition that the docstring names, and leaves that another optimizer has."""
    inner = optax.masked(optax.adamw(1e-3, **HYPER), {"w": True, "b": False, "embedding": True})
    clipped = lowmem.update_clipping(inner, b2=0.99, eps=1e-6)
    tx = lowmem.split_master_weights(
        lowmem.compress_state(
            clipped, mu=lowmem.codecs.softsign(), policy=lowmem.Policy(min_size=0)
        )
    )
    params, state = lowmem.init(tx, parameters())
    for g in stream(3):
        updates, state = jax.jit(tx.update)(g, state, params)
        params = optax.apply_updates(params, updates)
    assert all(np.isfinite(np.float32(p)).all() for p in params.values())
