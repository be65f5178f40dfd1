"""Gradient accumulation into bf16 and into the moments."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lowmem as lowmem
from optax_lowmem import Storage
from optax_lowmem._src.arrays import varying
from tests import tolerances
from tests.meshes import mesh_of

PLAIN = Storage(mu=None, nu=None)
EVERY = 4


def micro_batches(count, seed=0, shape=(64, 128)):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=(count, *shape)) * 0.01, jnp.float32)


def run(tx, params, state, gradients):
    """Parameters and states after every micro-batch."""
    update = jax.jit(lambda g, s, p: tx.update({"w": g}, s, p))
    history = []
    for g in gradients:
        updates, state = update(g, state, params)
        params = optax.apply_updates(params, updates)
        history.append((params, state))
    return history


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


# ---- into bfloat16 ---------------------------------------------------------------------------
def test_bfloat16_is_MultiSteps():
    """Against optax's f32 buffer: bf16 roundings of the running mean, and nothing else."""
    gradients = micro_batches(2 * EVERY)
    params = {"w": jnp.zeros((64, 128))}
    ours = lowmem.accumulate_gradients(optax.sgd(1.0), EVERY, "bfloat16")
    plain = optax.MultiSteps(optax.sgd(1.0), EVERY)
    mine = run(ours, params, ours.init(params), gradients)
    theirs = run(plain, params, plain.init(params), gradients)
    running = jnp.abs(jnp.cumsum(gradients.reshape(2, EVERY, 64, 128) / EVERY, axis=1))
    # each step stores EVERY - 1 running means, each within one bf16 spacing of the exact one
    steps = jnp.max(running, axis=1) + tolerances.BF16_SPACING * EVERY * jnp.max(running)
    bound = jnp.cumsum((EVERY - 1) * tolerances.BF16_SPACING * steps, axis=0)
    for index, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        error = jnp.abs(a[0]["w"] - b[0]["w"])
        assert bool(jnp.all(error <= bound[index // EVERY] + 1e-7)), index
    assert float(jnp.max(jnp.abs(mine[-1][0]["w"] - theirs[-1][0]["w"]))) > 1e-6, "bf16 it is"
    assert bits(mine[EVERY - 2][0]) == bits(params) != bits(mine[EVERY - 1][0])


def test_bfloat16_loses_no_small_gradients():
    every, params = 1024, {"w": jnp.zeros((64, 64))}
    tx = lowmem.accumulate_gradients(optax.sgd(1.0), every, "bfloat16")

    def micro(carry, _):
        state, plain = carry
        updates, state = tx.update({"w": jnp.ones((64, 64))}, state, params)
        return (state, plain + jnp.bfloat16(1 / every)), updates["w"]

    start = (tx.init(params), jnp.zeros((), jnp.bfloat16))
    (state, plain), updates = jax.jit(lambda c: jax.lax.scan(micro, c, length=every))(start)
    assert float(plain) <= 0.5, "the control stalls"
    assert not bool(jnp.any(updates[:-1]))
    mean = -np.asarray(updates[-1], np.float64)
    assert abs(mean.mean() - 1) <= tolerances.stochastic_sum(every, 2**-8, 4096)
    assert mean.std() > 0 and np.abs(mean - 1).max() < 0.4
    assert (int(state.micro_step), int(state.count)) == (0, every)
    assert not bool(jnp.any(state.accumulated["w"]))


def test_bfloat16_around_any_optimizer():
    tx = lowmem.accumulate_gradients(
        lowmem.chain(optax.clip_by_global_norm(1.0), lowmem.flash_lion(1e-2)), EVERY, "bfloat16"
    )
    params, state = lowmem.init(tx, {"w": jnp.ones((64, 128))})
    history = run(tx, params, state, micro_batches(2 * EVERY))
    masters = [lowmem.master_params(p, s)["w"] for p, s in history]
    assert bits(masters[2]) == bits(jnp.ones((64, 128)))
    assert float(jnp.min(jnp.abs(masters[3] - 1))) > 5e-3
    assert bits(masters[3]) == bits(masters[6]) != bits(masters[7])


# ---- the gradient of a batch in parts --------------------------------------------------------
def linear_loss(params, batch):
    return jnp.mean(batch["x"] @ params["w"] * batch["y"]) + 0 * jnp.sum(params["scale"])


def test_value_and_grad_is_that_of_the_whole_batch():
    rng = np.random.default_rng(0)
    rows = {"x": rng.normal(size=(32, 256)), "y": rng.normal(size=(32, 1))}
    batch = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), rows)
    params = {"w": jnp.ones((256, 1), jnp.bfloat16), "scale": jnp.ones(3)}
    in_parts = jax.jit(lowmem.value_and_grad(linear_loss, EVERY))
    value, gradients = in_parts(params, batch, 0)
    assert value.dtype == jnp.float32 and {g.dtype for g in jax.tree.leaves(gradients)} == {
        jnp.dtype(jnp.bfloat16)
    }
    assert float(value) == pytest.approx(float(linear_loss(params, batch)), abs=1e-5)

    # each micro-batch's gradient is rounded to the bf16 of its parameter before it is added
    of_part, parts = jax.jit(jax.grad(linear_loss)), range(EVERY)
    each = [of_part(params, {name: x[i::EVERY] for name, x in batch.items()})["w"] for i in parts]
    partial = np.cumsum(np.asarray(each, np.float64) / EVERY, axis=0)
    bound = EVERY * tolerances.BF16_SPACING * np.abs(partial).max(0)
    found = np.asarray(
        jax.vmap(lambda seed: in_parts(params, batch, seed)[1]["w"])(jnp.arange(512)), np.float64
    )
    assert (np.abs(found - partial[-1]) <= bound).all()
    error = found.mean(0) - partial[-1]
    assert np.abs(error).max() <= 5 * (found.std(0) / 512**0.5 + 1e-9).max(), "unbiased"
    assert (found.std(0) > 0).any(), "another seed rounds otherwise"


def test_value_and_grad_adds_in_f32():
    """Powers of two add without rounding in f32, and lose the small ones in bf16."""
    batch = {"x": jnp.exp2(jnp.arange(8.0)[:, None] * -2), "y": jnp.ones((8, 1))}
    params = {"w": jnp.ones((1, 1)), "scale": jnp.ones(3)}
    exact = float(batch["x"].mean())
    of_f32 = jax.jit(lowmem.value_and_grad(linear_loss, 8, dtype="float32"))(params, batch, 0)[1]
    of_bf16 = jax.jit(lowmem.value_and_grad(linear_loss, 8))(params, batch, 0)[1]
    assert {g.dtype for g in jax.tree.leaves(of_f32)} == {jnp.dtype(jnp.float32)}
    assert float(of_f32["w"][0, 0]) == exact != float(of_bf16["w"][0, 0])


def test_value_and_grad_of_one_micro_batch_is_jaxs():
    params = {"w": jnp.ones((8, 1)), "scale": jnp.ones(3)}
    batch = {"x": jnp.ones((4, 8)), "y": jnp.ones((4, 1))}
    found, wanted = (
        make(params, batch, *seed)
        for make, seed in (
            (lowmem.value_and_grad(linear_loss, 1), [0]),
            (jax.value_and_grad(linear_loss), []),
        )
    )
    assert bits(found) == bits(wanted)


@pytest.mark.parametrize("number", [1, 2])
def test_what_is_prepared_is_computed_once_without_gradients(number):
    """Of a loss a p + b with p = sin(a): the gradient is p where it is that of a p(a) else."""
    params, batch = {"w": jnp.float32(0.5)}, jnp.arange(4.0)

    def loss(params, batch, prepared):
        return jnp.mean(params["w"] * prepared["sine"] + batch)

    of_batch = lowmem.value_and_grad(loss, number, lambda p: {"sine": jnp.sin(p["w"])})
    value, gradient = jax.jit(of_batch)(params, batch, 0)
    sine = float(jnp.sin(0.5))
    assert float(value) == pytest.approx(0.5 * sine + 1.5, abs=1e-6)
    assert float(gradient["w"]) == pytest.approx(sine, rel=tolerances.BF16_SPACING)
    text = str(jax.make_jaxpr(of_batch)(params, batch, 0))
    assert text.count("sin ") == 1 and "cos" not in text
    assert number == 1 or text.index("sin ") < text.index("scan[")
    # nor with respect to what the result is differentiated by
    whole = jax.grad(lambda p: of_batch(p, batch, 0)[0])(params)
    assert float(whole["w"]) == pytest.approx(sine, rel=1e-6)


def test_value_and_grad_on_a_mesh():
    """Each device has its rows of every micro-batch, and the gradient where the parameter lies."""
    mesh = jax.make_mesh((8,), ("rows",))
    rows, cut = (
        jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        for spec in (("rows",), ("rows", None))
    )
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(32, 64)), "y": rng.normal(size=(32, 1))}
    batch = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), batch)
    params = {"w": jnp.ones((64, 1)), "scale": jnp.ones(3)}
    in_parts = jax.jit(lowmem.value_and_grad(linear_loss, 2))
    wanted = in_parts(params, batch, 3)
    with jax.set_mesh(mesh):
        placed = {"w": jax.device_put(params["w"], cut), "scale": params["scale"]}
        found = in_parts(placed, jax.device_put(batch, rows), 3)
    assert float(found[0]) == pytest.approx(float(wanted[0]), abs=1e-6)
    difference = jnp.abs(jnp.asarray(np.asarray(found[1]["w"])) - wanted[1]["w"])
    assert float(difference.max()) <= tolerances.BF16_SPACING * float(jnp.abs(wanted[1]["w"]).max())


@pytest.mark.parametrize(
    ("number", "rows", "message"),
    [
        (0, 4, "at least 1, got 0"),
        (True, 4, "got True"),
        (3, 4, r"batch leaf 'x' has shape \(4, 8\): axis 0 must be divisible by 3 micro-batches"),
    ],
)
def test_value_and_grad_refuses(number, rows, message):
    params = {"w": jnp.ones((8, 1)), "scale": jnp.ones(3)}
    with pytest.raises(ValueError, match=message):
        lowmem.value_and_grad(linear_loss, number)(params, {"x": jnp.ones((rows, 8))}, 0)


@pytest.mark.parametrize("seed", [0.5, jax.random.key(0), jnp.zeros(2, jnp.int32)], ids=str)
def test_value_and_grad_refuses_a_seed_that_is_no_integer(seed):
    params = {"w": jnp.ones((8, 1)), "scale": jnp.ones(4)}
    with pytest.raises(TypeError, match="an integer, such as the step number, got"):
        lowmem.value_and_grad(linear_loss, 2)(params, {"x": jnp.ones((4, 8))}, seed)


# ---- into the moments ------------------------------------------------------------------------
@pytest.mark.parametrize(
    "decay", [{}, {"weight_decay": 0.1}, {"weight_decay": 0.1, "decoupled": True}]
)
def test_moments_of_sgd_are_those_of_the_whole_batch(decay):
    gradients = micro_batches(3 * EVERY)
    inner = lowmem.flash_sgd(0.5, momentum=0.9, storage=PLAIN, **decay)
    tx = lowmem.accumulate_gradients(inner, EVERY, "moments")
    params = {"w": jnp.ones((64, 128))}
    mine = run(tx, params, tx.init(params), gradients)[EVERY - 1 :: EVERY]
    whole = run(inner, params, inner.init(params), gradients.reshape(3, EVERY, 64, 128).mean(1))
    for (a, mine_state), (b, state) in zip(mine, whole, strict=True):
        assert float(jnp.max(jnp.abs(a["w"] - b["w"]))) <= 1e-6
        assert float(jnp.max(jnp.abs(mine_state.inner_state.mu["w"] - state.mu["w"]))) <= 1e-7
        assert int(mine_state.inner_state.count) == int(state.count)


def adam_accumulation(w, gradients, lr, b1, b2, eps, decay):
    """Adam Accumulation in float64: v takes the sum of squares of g / k."""
    w, m, v = np.asarray(w, np.float64), 0.0, 0.0
    for t, batch in enumerate(np.asarray(gradients, np.float64), start=1):
        m = b1 * m + (1 - b1) * (batch / EVERY).sum(0)
        v = b2 * v + (1 - b2) * ((batch / EVERY) ** 2).sum(0)
        direction = (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)
        w = w - lr * (direction + decay * w)
    return w, m, v


def test_moments_of_adam():
    gradients = micro_batches(3 * EVERY)
    inner = lowmem.flash_adamw(1e-2, weight_decay=0.1, storage=PLAIN)
    tx = lowmem.accumulate_gradients(inner, EVERY, "moments")
    params = {"w": jnp.ones((64, 128))}
    last, state = run(tx, params, tx.init(params), gradients)[-1]
    split = gradients.reshape(3, EVERY, 64, 128)
    w, m, v = adam_accumulation(params["w"], split, 1e-2, 0.9, 0.999, 1e-8, 0.1)
    np.testing.assert_allclose(last["w"], w, rtol=2e-6)
    np.testing.assert_allclose(state.inner_state.mu["w"], m, rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(state.inner_state.nu["w"], v, rtol=1e-5)
    whole = optax.adamw(1e-2, weight_decay=0.1)
    other = run(whole, params, whole.init(params), split.mean(1))[-1][0]["w"]
    assert float(jnp.max(jnp.abs(other - last["w"]))) > 1e-4, "and not plain Adam's"


def test_shared_second_moments_take_the_means_of_these_squares():
    """Of rows and columns, and of a block that is the leaf."""
    gradients, eps = micro_batches(2 * EVERY), 1e-8
    split = np.asarray(gradients, np.float64).reshape(2, EVERY, 64, 128) / EVERY
    m, v, wanted = 0.0, 0.0, {"factored": np.ones((64, 128)), "mini": np.ones((64, 128))}
    for t, batch in enumerate(split, start=1):
        m, v = 0.9 * m + 0.1 * batch.sum(0), 0.999 * v + 0.001 * (batch**2).sum(0)
        shared = {"factored": np.outer(v.mean(1), v.mean(0)) / v.mean(), "mini": v.mean()}
        for name, x in shared.items():
            wanted[name] -= 1e-2 * (m / (1 - 0.9**t)) / (np.sqrt(x / (1 - 0.999**t)) + eps)
    whole = lowmem.blocks.Structure(default="whole")
    makers = {
        "factored": lowmem.flash_factored_adamw(
            1e-2, weight_decay=0.0, min_dim_size_to_factor=64, storage=PLAIN
        ),
        "mini": lowmem.adam_mini(1e-2, weight_decay=0.0, blocks=whole),
    }
    for name, inner in makers.items():
        tx = lowmem.accumulate_gradients(inner, EVERY, "moments")
        params = {"w": jnp.ones((64, 128))}
        found = run(tx, params, tx.init(params), gradients)[-1][0]["w"]
        np.testing.assert_allclose(found, wanted[name], rtol=2e-6, err_msg=name)


@pytest.mark.parametrize(
    "make",
    [
        lambda: lowmem.flash_sgd(0.1, momentum=0.9, weight_decay=0.1),
        lambda: lowmem.flash_adam(1e-2),
        lambda: lowmem.flash_adamw(optax.linear_schedule(1e-2, 1e-3, 5), weight_decay=0.1),
    ],
    ids=["sgd", "adam", "adamw, schedule"],
)
def test_weights_stand_still_between_steps(make):
    tx = lowmem.accumulate_gradients(make(), EVERY, "moments")
    rng = np.random.default_rng(3)
    params, state = lowmem.init(tx, {"w": jnp.asarray(rng.normal(size=(64, 128)), jnp.float32)})
    before = bits((params, state.inner_state.correction))
    for index, (p, s) in enumerate(run(tx, params, state, micro_batches(3 * EVERY, 1))):
        now = bits((p, s.inner_state.correction))
        stepped = index % EVERY == EVERY - 1
        assert (now != before) == stepped, index
        assert int(s.micro_step) == (index + 1) % EVERY
        assert int(s.inner_state.count) == (index + 1) // EVERY
        before = now


def test_every_1_is_the_optimizer_itself():
    gradients, params = micro_batches(3), {"w": jnp.ones((64, 128), jnp.bfloat16)}
    inner = lowmem.flash_adamw(1e-2)
    tx = lowmem.accumulate_gradients(inner, 1, "moments")
    mine = run(tx, params, tx.init(params), gradients)[-1]
    assert bits(mine[0]) == bits(run(inner, params, inner.init(params), gradients)[-1][0])


def test_bytes():
    params = {"w": jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)}
    inner = lowmem.flash_adamw(1e-3)

    def per_parameter(tx):
        return round(lowmem.memory.report(tx, params).state_bytes / 2**20, 3)

    alone = per_parameter(inner)
    assert per_parameter(lowmem.accumulate_gradients(inner, 4, "bfloat16")) == round(alone + 2, 3)
    assert per_parameter(lowmem.accumulate_gradients(inner, 4, "moments")) == alone
    f32 = {"w": jax.ShapeDtypeStruct((1024, 1024), jnp.float32)}
    state = lowmem.memory.report(optax.MultiSteps(inner, 4), f32)
    assert state.by_slot["acc_grads"] == 4 * 2**20


REFUSED = {
    "lion": (lambda: lowmem.flash_lion(1e-3), "LionRule needs the whole gradient at once"),
    "nesterov": (lambda: lowmem.flash_sgd(0.1, 0.9, True), "MomentumRule needs the whole"),
    "nadamw": (lambda: lowmem.flash_adamw(0.1, nesterov=True), "AdamRule needs the whole"),
    "no momentum": (lambda: lowmem.flash_sgd(0.1), "GradientRule needs the whole"),
    "chain": (lambda: lowmem.chain(lowmem.flash_adamw(1e-3)), r"a chain or mask around it"),
    "direction": (lambda: lowmem.scale_by_flash_adam(), "a bare scale_by_"),
    "optax": (lambda: optax.adamw(1e-3), "needs an unwrapped flash_sgd, flash_adam or flash_adamw"),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_what_moments_refuse(make, message):
    with pytest.raises(ValueError, match=f"(?s){message}.*into='bfloat16'"):
        tx = lowmem.accumulate_gradients(make(), 4, "moments")
        tx.init({"w": jnp.ones((64, 64))})


# ---- as part of a program --------------------------------------------------------------------
@pytest.mark.parametrize("into", ["bfloat16", "moments"])
def test_a_fresh_state_can_be_donated(into):
    """No array is in two places of it: XLA refuses to donate one twice."""
    tx = lowmem.accumulate_gradients(lowmem.flash_adamw(1e-3), EVERY, into)
    params, state = lowmem.init(tx, {"w": jnp.ones((64, 128))})
    places = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state) if leaf.size]
    assert len(set(places)) == len(places)
    grads = {"w": jnp.ones((64, 128))}
    step = jax.jit(lambda g, s, p: lowmem.step(tx, g, s, p), donate_argnums=(1, 2))
    params, state = step(grads, state, params)
    assert int(state.count) == 1


def test_on_devices_that_differ():
    """Local SGD: parameters, state and gradients of each device are its own."""
    mesh = mesh_of(d=2)
    tx = lowmem.accumulate_gradients(optax.sgd(0.1), 2, "bfloat16")
    gradients = micro_batches(2, shape=(2, 64, 128))

    def train(w, gradients):
        params = {"w": w[0]}
        state, _ = varying.alike(tx.init(params), w)
        for g in gradients[:, 0]:
            updates, state = tx.update({"w": g}, state, params)
            params = optax.apply_updates(params, updates)
        return params["w"][None]

    specs = jax.P("d"), jax.P(None, "d")
    run_all = jax.jit(jax.shard_map(train, mesh=mesh, in_specs=specs, out_specs=jax.P("d")))
    found = run_all(jnp.zeros((2, 64, 128)), gradients)
    np.testing.assert_allclose(found, -0.1 * gradients.mean(0), atol=2**-8 * 0.1 * 0.04)


def test_a_state_of_another_optimizer():
    tx, params = lowmem.flash_adamw(1e-3), {"w": jnp.ones((64, 128))}
    others = [
        lowmem.accumulate_gradients(tx, EVERY, "bfloat16"),
        lowmem.accumulate_gradients(tx, EVERY, "moments"),
        lowmem.track_master_ema(tx, 0.9),
    ]
    for other in others:
        with pytest.raises(ValueError, match="the state is a FlashAdamState, this optimizer keeps"):
            other.update(params, tx.init(params), params)
