"""The Adam-mini family against float64: every kind of block, storage, path of a step, bad input."""

import dataclasses
import functools
import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lowmem as lowmem
from optax_lowmem import codecs
from tests import tolerances as tol
from tests.oracle import adam_mini as oracle
from tests.oracle.adam_mini import Block
from tests.tiers import in_turn, rows

BF16, F32 = jnp.bfloat16, jnp.float32

# path -> (shape, block by hand): 4 query and 2 key heads of 3, 2 layers stacked, long inputs
LEAVES = {
    "embedder/embedding": ((30, 12), Block((1,))),
    "layers_0/attn/query/kernel": ((12, 4, 3), Block((0, 2))),
    "layers_0/attn/key/kernel": ((12, 2, 3), Block((0, 2))),
    "layers_0/attn/value/kernel": ((12, 2, 3), Block((0,))),
    "layers_0/attn/out/kernel": ((4, 3, 12), Block((0, 1))),
    "layers_0/flat_attn/q_proj/kernel": ((128, 12), Block((0,), (1, 4))),
    "layers_0/flat_attn/k_proj/kernel": ((12, 6), Block((0,), (1, 2))),
    "layers_0/flat_attn/v_proj/kernel": ((12, 6), Block((0,))),
    "layers_0/flat_attn/o_proj/kernel": ((12, 12), Block((0,))),
    "layers_0/mlp/up_proj/kernel": ((12, 35), Block((0,))),
    "layers_0/mlp/down_proj/kernel": ((192, 12), Block((0,))),
    "layers_0/mlp/up_proj/bias": ((35,), Block((0,))),
    "stacked/layers/attn/q_proj/kernel": ((2, 12, 12), Block((1,), (2, 4))),
    "stacked/layers/attn/k_proj/kernel": ((2, 12, 6), Block((1,), (2, 2))),
    "stacked/layers/attn/query/kernel": ((2, 12, 4, 3), Block((1, 3))),
    "stacked/layers/mlp/wi/kernel": ((2, 12, 35), Block((1,))),
    "stacked/layers/norm/scale": ((2, 12), Block((1,))),
    "final_norm/scale": ((12,), Block((0,))),
    "lm_head/kernel": ((12, 30), Block((0,))),
    "router/gate": ((5, 12), Block()),
    "router/last": ((5, 12), Block((1,))),
    "temperature": ((), Block()),
    "unheard/of": ((7, 3), Block((0, 1))),
}
# one of each kind, where the layout of the state is what is tested
SOME = [
    "embedder/embedding", "layers_0/attn/key/kernel", "layers_0/flat_attn/q_proj/kernel",
    "stacked/layers/mlp/wi/kernel", "final_norm/scale", "router/gate", "router/last", "temperature",
]  # fmt: skip
STRUCTURE = lowmem.blocks.Structure(
    heads=4,
    kv_heads=2,
    rules=(("router/gate", "elementwise"), ("router/last", (-1,))),
    default="whole",
)
EVERYTHING = lowmem.Policy(min_size=0)
HYPER = {"b1": 0.9, "b2": 0.95, "eps": 1e-6, "weight_decay": 0.1}


def nested(flat):
    tree = {}
    for path, leaf in flat.items():
        *above, last = path.split("/")
        node = tree
        for part in above:
            node = node.setdefault(part, {})
        node[last] = leaf
    return tree


def flat(tree):
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def draw(rng, shape, size):
    """Normal numbers whose sizes differ along every axis, so that another block is another step."""
    x = size * rng.normal(size=shape)
    for axis, length in enumerate(shape):
        kept = [length if a == axis else 1 for a in range(len(shape))]
        x = x * np.exp(0.7 * rng.normal(size=kept))
    return np.float32(x)


def parameters(paths=tuple(LEAVES)):
    rng = np.random.default_rng(0)
    return {path: draw(rng, LEAVES[path][0], 0.2) for path in paths}


def stream(steps, paths=tuple(LEAVES), dtype=F32):
    rng = np.random.default_rng(1)
    for _ in range(steps):
        grads = {path: draw(rng, LEAVES[path][0], 1e-2) for path in paths}
        yield {path: np.array(jnp.asarray(g, dtype)) for path, g in grads.items()}


def device(arrays):
    return nested({path: jnp.asarray(leaf) for path, leaf in arrays.items()})


def stepper(tx, how):
    def by_update(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    if how == "eager":
        return by_update
    return jax.jit(by_update if how == "update" else functools.partial(lowmem.step, tx))


def mini(make=None, lr=1e-2, **changes):
    return (make or lowmem.adam_mini)(lr, **{**HYPER, "blocks": STRUCTURE, **changes})


def by_oracle(grads, lr=1e-2, params=None, **changes):
    """path -> [(weights, m, v_mean)] after every step."""
    hyper = {"lr": lr, **HYPER, **changes}
    grads = list(grads)
    return {
        path: oracle.trajectory(w, [g[path] for g in grads], LEAVES[path][1], **hyper)
        for path, w in (params or parameters()).items()
    }


def mean_shape(path):
    shape, block = LEAVES[path]
    axes = {axis % len(shape) for axis in block.axes} if shape else ()
    kept = [1 if axis in axes else length for axis, length in enumerate(shape)]
    if block.heads:
        kept[block.heads[0]] = block.heads[1]
    return tuple(kept)


def near(found, wanted, path="", rtol=tol.ADAM_MINI_RTOL, atol=tol.ADAM_MINI_ATOL):
    np.testing.assert_allclose(np.float64(found), wanted, rtol=rtol, atol=atol, err_msg=path)


# ---- f32 weights ---------------------------------------------------------------------------------
def warmup(count):
    return 1e-2 * (1 + count) / 10


SCHEDULED = {  # learning rate, arguments of ours, of the oracle
    "constant": (1e-2, {}, {}),
    "schedule": (warmup, {}, {}),
    "decoupled": (warmup, {"decouple_lr": 1e-2}, {"peak_lr": 1e-2}),
    "eps_root": (1e-2, *[{"eps": 0.0, "eps_root": 1e-5, "weight_decay": 0.0}] * 2),
}


@pytest.mark.parametrize(
    "how, rate",
    rows(
        [("eager", "constant"), ("update", "constant"), *(("step", rate) for rate in SCHEDULED)],
        [("update", "constant"), ("step", "schedule"), ("step", "decoupled")],
    ),
)
def test_every_kind_of_block_is_the_oracles(how, rate):
    lr, changes, exact = SCHEDULED[rate]
    tx, grads = mini(lr=lr, **changes), list(stream(5))
    wanted = by_oracle(grads, lr, **exact)
    params = device(parameters())
    state, step = tx.init(params), stepper(tx, how)
    for t, g in enumerate(grads):
        params, state = step(device(g), state, params)
        mu, nu = flat(state.mu), flat(state.nu)
        for path, weight in flat(params).items():
            w, m, v = wanted[path][t]
            near(weight, w, path)
            near(mu[path], m, path, tol.ADAM_MINI_MOMENT, tol.ADAM_MINI_MOMENT * np.abs(m).max())
            assert nu[path].shape == mean_shape(path) and nu[path].dtype == F32
            near(np.ravel(nu[path]), v, path, tol.ADAM_MINI_MOMENT, 0)
    assert int(state.count) == 5


def test_elementwise_is_optaxs_adamw():
    structure = lowmem.blocks.Structure(rules=(("*", "elementwise"),))
    grads = list(stream(5))
    found = {}
    for name, tx in (("mini", mini(blocks=structure)), ("optax", optax.adamw(1e-2, **HYPER))):
        params = device(parameters())
        state, step = tx.init(params), stepper(tx, "update")
        for g in grads:
            params, state = step(device(g), state, params)
        found[name] = flat(params)
    for path, weight in found["optax"].items():
        near(found["mini"][path], np.float64(weight), path)


def test_decay_follows_its_mask():
    mask = nested({path: len(shape) > 1 for path, (shape, _) in LEAVES.items()})
    tx, grads = mini(mask=mask), list(stream(3))
    decayed, bare = by_oracle(grads), by_oracle(grads, weight_decay=0.0)
    params = device(parameters())
    state, step = tx.init(params), stepper(tx, "step")
    for g in grads:
        params, state = step(device(g), state, params)
    for path, weight in flat(params).items():
        near(weight, (decayed if len(LEAVES[path][0]) > 1 else bare)[path][-1][0], path)


def test_behind_clipping_the_means_are_of_clipped_gradients():
    """A factor that the optimizer takes itself: of g in m, and of g in v_mean, once."""
    tx, grads = lowmem.chain(optax.clip_by_global_norm(1e-3), mini()), list(stream(3, SOME))
    norms = [np.sqrt(sum(np.sum(np.float64(g) ** 2) for g in one.values())) for one in grads]
    assert min(norms) > 1e-2
    clipped = [
        {path: np.float64(g) * (1e-3 / norm) for path, g in one.items()}
        for one, norm in zip(grads, norms, strict=True)
    ]
    wanted = by_oracle(clipped, params=parameters(SOME))
    params = device(parameters(SOME))
    state, step = tx.init(params), stepper(tx, "step")
    for g in grads:
        params, state = step(device(g), state, params)
    for path, weight in flat(params).items():
        near(weight, wanted[path][-1][0], path)


def test_gradients_accumulated_into_the_moments():
    """m takes the mean of two micro-batches, v_mean the sum of the means of (g / 2)^2."""
    tx, grads = lowmem.accumulate_gradients(mini(), 2, into="moments"), list(stream(4, SOME))
    params = device(parameters(SOME))
    state, step = tx.init(params), stepper(tx, "step")
    for g in grads:
        params, state = step(device(g), state, params)
    for path, weight in flat(params).items():
        block, w = LEAVES[path][1], np.float64(parameters(SOME)[path])
        m, v = oracle.init(w, block)
        for t in (1, 2):
            halves = [np.float64(g[path]) / 2 for g in grads[2 * t - 2 : 2 * t]]
            m = 0.9 * m + 0.1 * sum(halves)
            v = 0.95 * v + 0.05 * sum(block.average(g**2) for g in halves)
            root = (np.sqrt(v / (1 - 0.95**t)) + HYPER["eps"])[block.numbers(w.shape)]
            w = w - 1e-2 * (m / (1 - 0.9**t) / root + HYPER["weight_decay"] * w)
        near(weight, w, path)


# ---- 16-bit weights and 8-bit moments ------------------------------------------------------------
@pytest.mark.parametrize(
    "bits, how", rows([(24, "update"), (24, "step"), (32, "step")], [(24, "update"), (32, "step")])
)
def test_split_weights_follow_the_oracle(bits, how):
    """bf16 weights and gradients, f32 moments: masters lose what 24 or 32 bits do, step by step."""
    storage = lowmem.Storage.full_precision(master_weight_bits=bits)
    storage = dataclasses.replace(storage, master_rounding="nearest")
    tx, grads = mini(storage=storage), list(stream(5, SOME, BF16))
    params, state = lowmem.init(tx, device(parameters(SOME)), BF16)
    start = {p: np.float32(w) for p, w in flat(lowmem.master_params(params, state)).items()}
    wanted, step = by_oracle([{p: np.float64(g) for p, g in one.items()} for one in grads],
                             params=start), stepper(tx, how)  # fmt: skip
    unit = tol.MASTER_24_MAX if bits == 24 else tol.F32_EPS
    for t, g in enumerate(grads, start=1):
        params, state = step(device(g), state, params)
        assert all(weight.dtype == BF16 for weight in jax.tree.leaves(params))
        for path, master in flat(lowmem.master_params(params, state)).items():
            w = wanted[path][t - 1][0]
            near(master, w, path, t * unit + tol.ADAM_MINI_RTOL)


FAMILY = {  # our optimizers, by name and storage
    "adam_mini": lowmem.Storage.full_precision(),
    "q_adam_mini": lowmem.Storage(
        mu=codecs.affine(), nu=None, group_size=256, rounding="embeddings", policy=EVERYTHING
    ),
    "q_adam_mini nu8": lowmem.Storage(
        mu=codecs.affine(), nu=codecs.linear(signed=False), group_size=16, policy=EVERYTHING
    ),
    "flash_adam_mini": lowmem.Storage(nu=None, policy=EVERYTHING),
}


@functools.cache
def member(name):
    """The optimizer and its compiled step."""
    tx = mini(getattr(lowmem, name.split()[0]), storage=FAMILY[name])
    return tx, stepper(tx, "step")


@pytest.mark.parametrize(
    "name, dtype",
    rows(
        itertools.product([name for name in FAMILY if name != "adam_mini"], [BF16, F32]),
        [("q_adam_mini", BF16), ("q_adam_mini nu8", F32)],
    ),
)
def test_8_bit_moments_take_the_oracles_step(name, dtype):
    """Each step from the decoded state: weights from the new m itself, codes within their bound."""
    tx, step = member(name)
    storage = tx.engine.storage
    params, state = lowmem.init(tx, device(parameters(SOME)), dtype)
    for t, g in enumerate(stream(4, SOME, dtype), start=1):
        before = decoded(params, state, storage)
        params, state = step(device(g), state, params)
        after = decoded(params, state, storage)
        for path, (weight, m, v) in before.items():
            rounded = np.float64(g[path])
            exact = oracle.step(weight, m, v, rounded, t, LEAVES[path][1], lr=1e-2, **HYPER)
            unit = tol.MASTER_24_STOCHASTIC if dtype == BF16 else 0
            near(after[path][0], exact[0], path, unit + tol.ADAM_MINI_RTOL)
            if LEAVES[path][0]:
                bound = code_bound(storage.mu, exact[1], storage.group_size)
                slack = tol.ADAM_MINI_MOMENT * np.abs(exact[1]).max()
                assert (np.abs(after[path][1] - exact[1]) <= bound + slack).all(), path
            if storage.nu is None:
                near(after[path][2], exact[2], path, tol.ADAM_MINI_MOMENT, 0)
            else:  # of the largest v_mean of the leaf: a code of 255, and at most that
                near(after[path][2], exact[2], path, 0, 1.01 / 255 * exact[2].max())


def decoded(params, state, storage):
    """path -> (master weights, m, v_mean) in float64; 8-bit v_mean is one row."""
    masters = flat(lowmem.master_params(params, state))
    slots = {}
    for slot in ("mu", "nu"):
        stored, scales = flat(getattr(state, slot)), flat(getattr(state, slot + "_scale"))
        for path, value in stored.items():
            if value.dtype != F32:
                row = value.ravel() if slot == "nu" else value
                codec = getattr(storage, slot)
                value = codecs.decode_array(codec, row, scales[path], storage.group_size)
            slots.setdefault(path, []).append(np.float64(value))
    return {
        path: (np.float64(w), slots[path][0], slots[path][1].ravel()) for path, w in masters.items()
    }


def code_bound(codec, x, group_size):
    groups = [
        x[..., at : at + group_size].astype(np.float32) for at in range(0, x.shape[-1], group_size)
    ]
    return np.concatenate([np.float64(stochastic_bound(codec, g)) for g in groups], axis=-1)


@functools.partial(jax.jit, static_argnums=0)
def stochastic_bound(codec, group):
    return codec.error_bound(group, stochastic=True)


def test_rounding_of_embeddings_only():
    """`embeddings`: seeds change the codes of the table and of nothing else."""
    tx, step = member("q_adam_mini")
    [grads] = stream(1, SOME)
    found = []
    for seed in (0, 1):
        params, state = lowmem.init(tx, device(parameters(SOME)), F32, seed=seed)
        found.append(flat(step(device(grads), state, params)[1].mu))
    changed = {p for p in SOME if (np.asarray(found[0][p]) != np.asarray(found[1][p])).any()}
    assert changed == {"embedder/embedding"}


# ---- edges ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "name, dtype",
    rows(itertools.product(FAMILY, [BF16, F32]), [("q_adam_mini", BF16)]),
)
def test_zero_gradients_only_decay(name, dtype):
    """0 / (0 + eps): no NaN in a tensor or a block without gradients, then or later."""
    tx, step = member(name)
    params, state = lowmem.init(tx, device(parameters(SOME)), dtype)
    start = flat(lowmem.master_params(params, state))
    silent = ["final_norm/scale", "temperature", "layers_0/attn/key/kernel"]
    unit = tol.MASTER_24_STOCHASTIC if dtype == BF16 else tol.F32_EPS
    for t, g in enumerate(stream(4, SOME, dtype), start=1):
        g |= {path: np.zeros_like(g[path]) for path in silent if t < 4}
        g["embedder/embedding"][5] = 0
        params, state = step(device(g), state, params)
        now = flat(lowmem.master_params(params, state))
        assert all(np.isfinite(np.float32(leaf)).all() for leaf in jax.tree.leaves((now, state)))
        decay = (1 - 1e-2 * HYPER["weight_decay"]) ** t
        for path in silent if t < 4 else ():
            near(now[path], np.float64(start[path]) * decay, path, t * unit, 0)
        table = "embedder/embedding"
        near(now[table][5], np.float64(start[table][5]) * decay, table, t * unit, 0)
    for path in silent:  # the first gradient after silence moves what it should
        assert (np.abs(now[path] - decay * start[path]) > 1e-3).any(), path


@pytest.mark.parametrize("name, bad", in_turn(FAMILY, [np.inf, -np.inf, np.nan]))
def test_what_is_not_finite_stays_in_its_tensor(name, bad):
    """Every other leaf is to the bit what it is without; and f32 moments lose one block only."""
    (tx, step), table, found = member(name), "embedder/embedding", []
    for value in (None, bad):
        params, state = lowmem.init(tx, device(parameters(SOME)), F32)
        for g in stream(2, SOME):
            if value is not None:
                g[table][3, 5] = value
            params, state = step(device(g), state, params)
        found.append({"weight": flat(params), "mu": flat(state.mu), "nu": flat(state.nu)})
    for what, clean in found[0].items():
        for path, leaf in clean.items():
            leaf, spoilt = np.asarray(leaf), np.asarray(found[1][what][path])
            if path != table:
                np.testing.assert_array_equal(spoilt, leaf, err_msg=f"{what} of {path}")
            elif name == "adam_mini":
                others = np.arange(30) != 3
                np.testing.assert_array_equal(spoilt[others], leaf[others], err_msg=what)
    assert np.isnan(np.asarray(found[1]["weight"][table])[3, 5])
    if found[1]["nu"][table].dtype == F32:
        assert not np.isfinite(np.asarray(found[1]["nu"][table])[3, 0])


def test_unrecognised_leaves_are_named_in_a_warning():
    params = device(parameters())
    rules = STRUCTURE.rules
    silent = lowmem.adam_mini(1e-2, blocks=STRUCTURE)
    loud = lowmem.adam_mini(1e-2, blocks=lowmem.blocks.Structure(heads=4, kv_heads=2, rules=rules))
    with pytest.warns(UserWarning, match="unheard/of") as caught:
        state = loud.init(params)
    assert not any("mlp/up_proj" in str(one.message) for one in caught)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same = silent.init(params)
        for default in ("whole", "elementwise"):
            structure = lowmem.blocks.Structure(heads=4, kv_heads=2, rules=rules, default=default)
            nu = lowmem.adam_mini(1e-2, blocks=structure).init(params).nu
            assert nu["unheard"]["of"].shape == ((1, 1) if default == "whole" else (7, 3))
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, same)


WRONG = {  # test_blocks.py has the others
    "5 heads do not divide axis 0 .*leaf 'unheard/of'": {
        "rules": (("unheard/of", lowmem.blocks.Block((1,), heads=(0, 5))),)
    },
    "heads=5 does not divide .*'layers_0/flat_attn/q_proj/kernel'": {"heads": 5},
}


@pytest.mark.parametrize("says", WRONG)
def test_a_bad_block_is_refused_with_the_leafs_name(says):
    blocks = lowmem.blocks.Structure(**{"default": "whole", **WRONG[says]})
    tx = mini(lowmem.flash_adam_mini, blocks=blocks)
    params = device(parameters(("unheard/of", *(p for p in LEAVES if "flat_attn" in p))))
    for init in (tx.init, functools.partial(lowmem.init, tx)):
        with pytest.raises(ValueError, match=says):
            init(params)
