"""flash_factored_adamw against float64, against AdamW where they agree, and on bad input."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lowmem as lowmem
from tests import tolerances as tol
from tests.oracle import factored as oracle
from tests.oracle import optimizers

F32 = jnp.float32
HYPER = {"b1": 0.9, "b2": 0.95, "eps": 1e-6, "weight_decay": 0.1}
# path -> (shape, its matrices' axes): the two largest; None where there is a value an element
LEAVES = {
    "matrix": ((12, 20), (0, 1)), "layers": ((3, 9, 16), (1, 2)), "heads": ((16, 4, 10), (0, 2)),
    "kernel": ((3, 3, 8, 16), (2, 3)), "narrow": ((30, 7), None), "norm": ((20,), None),
    "temperature": ((), None),
}  # fmt: skip
factored = functools.partial(lowmem.flash_factored_adamw, min_dim_size_to_factor=8)


def drawn(seed=0, scale=1.0):
    """Leaves whose columns and rows have scales of their own."""
    rng = np.random.default_rng(seed)
    found = {}
    for path, (shape, _) in LEAVES.items():
        spread = [np.exp(rng.normal(size=[n if a == i else 1 for a in range(len(shape))]))
                  for i, n in enumerate(shape)]  # fmt: skip
        found[path] = scale * rng.normal(size=shape) * np.prod(np.array(spread, object), axis=0)
    return {path: jnp.asarray(np.float64(x), F32) for path, x in found.items()}


def run(tx, params, gradients):
    step = jax.jit(lambda g, s, p: lowmem.step(tx, g, s, p))
    state = jax.jit(tx.init)(params)
    for g in gradients:
        params, state = step(g, state, params)
    return params, state


def matrices(x, axes):
    """[count, rows, columns] of a leaf."""
    x = np.moveaxis(np.float64(x), axes, (-2, -1))
    return x.reshape(-1, *x.shape[-2:])


@pytest.mark.parametrize("eps_root", [0.0, 1e-5])
def test_it_is_adafactors_second_moment_in_float64(eps_root):
    params, gradients = drawn(1), [drawn(seed, 0.1) for seed in range(2, 10)]
    hyper = {**HYPER, "eps_root": eps_root}
    storage = lowmem.Storage.full_precision()
    found, state = run(factored(1e-2, **hyper, storage=storage), params, gradients)
    for path, (shape, axes) in LEAVES.items():
        near = functools.partial(
            np.testing.assert_allclose, rtol=tol.ADAM_MINI_RTOL, atol=tol.ADAM_MINI_ATOL
        )
        if axes is None:
            given = [np.asarray(g[path]) for g in gradients]
            wanted = optimizers.trajectory(
                optimizers.adamw, np.asarray(params[path]), given, lr=1e-2, **hyper
            )[-1][0]
            near(found[path], wanted, err_msg=path)
            assert state.nu[path].shape == shape
            continue
        rows, columns = (shape[axis] for axis in axes)
        nu = np.asarray(state.nu[path]).reshape(-1, rows + columns)
        every = zip(
            matrices(params[path], axes), matrices(found[path], axes), nu,
            zip(*(matrices(g[path], axes) for g in gradients), strict=True), strict=True,
        )  # fmt: skip
        for start, end, means, given in every:
            theta, _, sums = oracle.trajectory(start, given, lr=1e-2, **hyper)[-1]
            near(end, theta, err_msg=path)
            wanted = np.concatenate([sums[0] / columns, sums[1] / rows])
            np.testing.assert_allclose(means, wanted, rtol=tol.ADAM_MINI_MOMENT)


def test_the_matrices_are_those_of_optax_adafactor():
    params = drawn()
    plain = optax.scale_by_factored_rms(min_dim_size_to_factor=8).init(params)
    state = factored(1e-2).init(params)
    for path, (_, axes) in LEAVES.items():
        rows, columns = plain.v_row[path], plain.v_col[path]
        if axes is None:
            assert state.nu[path].shape == plain.v[path].shape
        else:
            assert state.nu[path].size == rows.size + columns.size


@pytest.mark.parametrize(
    ("shape", "axes"),
    [((16,) * 3, (1, 2)), ((16, 8, 16, 16), (2, 3)), ((16, 16, 8), (0, 1)), ((8, 9, 9, 8), (1, 2))],
)
def test_the_last_of_equally_large_axes_are_rows_and_columns(shape, axes):
    """As for optax.adafactor, whose state does not tell axes of one size apart."""
    found = lowmem.checkpoint.metadata(
        factored(1e-2), {"w": jax.ShapeDtypeStruct(shape, "float32")}
    )
    assert tuple(found["slots"]["w"]["nu"]["block"]["axes"]) == axes


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_shows_in_its_whole_matrix_alone(value):
    params = drawn()
    bad = drawn(1)
    bad["layers"] = bad["layers"].at[1, 2, 3].set(value)
    found, _ = run(factored(1e-2), params, [bad, drawn(2)])
    for path, x in found.items():
        wanted = np.zeros(x.shape, bool)
        if path == "layers":
            wanted[1] = True
        np.testing.assert_array_equal(np.isnan(x), wanted, err_msg=path)


def test_gradients_of_zero_move_nothing():
    params = drawn()
    found, _ = run(factored(1e-2, weight_decay=0.0), params, [jax.tree.map(jnp.zeros_like, params)])
    jax.tree.map(np.testing.assert_array_equal, found, params)


def test_the_direction_can_be_clipped_as_adafactors():
    """By its root mean square, in 8-bit moments inside split weights."""
    direction = lowmem.scale_by_factored_adam(
        b1=0.0, min_dim_size_to_factor=8, storage=lowmem.Storage(nu=None)
    )
    rate = optax.scale_by_learning_rate(1.0)
    tx = lowmem.split_master_weights(optax.chain(direction, optax.clip_by_block_rms(0.5), rate))
    start = jax.tree.map(lambda x: x.astype(jnp.bfloat16), drawn())
    found, state = run(tx, start, [drawn(1)])
    master = lowmem.master_params(found, state)
    for path, (_, axes) in LEAVES.items():
        rms = np.sqrt(np.mean((np.float64(master[path]) - np.float64(start[path])) ** 2))
        assert rms <= 0.51 and (axes is None or rms >= 0.49), path


def test_explain_names_the_axes_and_a_wrong_size_is_refused():
    params = {"w": jnp.ones((128, 3, 256), jnp.bfloat16), "norm": jnp.ones(64)}
    text = str(lowmem.explain(lowmem.flash_factored_adamw(1e-3), params))
    assert "rows and columns" in text and "axes 0 and 2" in text
    assert "it has no rows and columns" in text
    for size in (0, 2.0, True):
        with pytest.raises(ValueError, match="min_dim_size_to_factor.*at least 1"):
            lowmem.flash_factored_adamw(1e-3, min_dim_size_to_factor=size)


def test_a_model_of_leaves_that_are_not_factored_warns():
    """Heads of 64, which are a third of a GPT; not a leaf that is small beside the others."""
    heads, large = jnp.ones((256, 8, 64), jnp.bfloat16), jnp.ones((2048, 4096), jnp.bfloat16)
    tx = lowmem.flash_factored_adamw(1e-3)
    words = r"'key' and 1 more of shape \(256, 8, 64\).*min_dim_size_to_factor=64"
    with pytest.warns(UserWarning, match=words):
        tx.init({"key": heads, "query": heads, "norm": jnp.ones(64)})
    with pytest.warns(UserWarning, match="'key' of shape"):
        lowmem.init(tx, {"key": heads})
    tx.init({"up": large})
    tx.init({"router": jnp.ones((2048, 32), jnp.bfloat16), "small": jnp.ones((256, 64))})
    tx.init({"router": jnp.ones((2050, 32), jnp.bfloat16), "up": large})
    for size in (64, 128):
        lowmem.flash_factored_adamw(1e-3, min_dim_size_to_factor=size).init({"key": heads})


def test_bytes():
    """2 + 1 + 1.06 and a value a row and column; 3.53 and 3.56 with 4-bit m; 8.06 without rows."""
    params = {"w": jnp.ones((1024, 2048), jnp.bfloat16)}
    rows = 4 * (1024 + 2048) / (1024 * 2048)
    for storage, wanted in (
        (lowmem.Storage(nu=None), 3 + 1 + 2 / 32),
        (lowmem.Storage.four_bit(nu=None, rounding="nearest"), 3 + 0.5 + 2 / 64),
        (lowmem.Storage.four_bit(nu=None, group_size=32), 3 + 0.5 + 2 / 32),
    ):
        tx = lowmem.flash_factored_adamw(1e-3, storage=storage)
        report = lowmem.memory.report(tx, params)
        np.testing.assert_allclose(report.bytes_per_param, wanted + rows, atol=1e-3)
    heads = {"query": jax.ShapeDtypeStruct((1024, 16, 64), jnp.bfloat16)}
    for least, wanted in ((None, 8 + 2 / 32), (64, 4 + 2 / 32 + 4 * 16 * (1024 + 64) / 2**20)):
        tx = lowmem.flash_factored_adamw(1e-3, min_dim_size_to_factor=least)
        np.testing.assert_allclose(
            lowmem.memory.report(tx, heads).bytes_per_param, wanted, atol=1e-3
        )
