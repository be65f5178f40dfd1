"""State and weights in host memory: streamed bits are resident bits, and what release clips."""

import dataclasses
import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import SingleDeviceSharding

import optax_lowmem as lowmem
from optax_lowmem import release
from optax_lowmem._src.arrays import host
from optax_lowmem._src.training.release import offload_step, room
from tests.compilation import QUICK_COMPILE
from tests.contract_cases import assert_same
from tests.step.test_release import (
    LAYERS,
    MODEL,
    WIDTH,
    batches,
    block,
    embed,
    loss,
    make,
    masters,
    ordinary,
    run,
)
from tests.tiers import rows
from tests.tolerances import REORDERED_CODES
from tests.wrappers.test_eager_programs import programs

BF16 = jnp.bfloat16


def weights(dtype=BF16):
    return jax.tree.map(lambda x: x.astype(dtype), masters())


def offloaded(tx, params, steps=2, model=MODEL, kind=host.PINNED, state=None, streams=False, **how):
    """(loss, parameters, state) after some steps, with their layers stacked."""
    params = jax.tree.map(jnp.array, params)
    if streams:
        params = release.offload_weights(model, params, min_bytes=0)
    state = release.offload(tx, model, params, state, memory_kind=kind, min_bytes=0)
    step = release.train_step(tx, model, offload=True, **how)
    for batch in batches(steps):
        value, params, state = step(params, state, batch)
    return value, on_device(params), on_device(state)


def on_device(state):
    """The state, or the parameters, as without offload."""
    return jax.device_put(host.stacked(state), SingleDeviceSharding(jax.devices()[0]))


def jitted(tx, params, model=MODEL, steps=2):
    """The results of the step as one program, compiled as the stages are."""
    step = release.train_step(tx, model)
    return run(step, params, tx.init(params), steps, QUICK_COMPILE)


def clipped(tx, norm=0.1):
    return lowmem.chain(optax.clip_by_global_norm(norm), tx)


# ---- streamed and resident -----------------------------------------------------------------------
HOW = {
    "whole": {},
    "micro": {"micro_batches": 4},
    "passes": {"micro_batches": 4, "at_once": 2},
    "odd": {"micro_batches": 4, "at_once": 3},
    "layer": {"clip_layer_norm": 0.1},
}
CASES = [  # every other pair
    (name, how)
    for i, name in enumerate(lowmem.OPTIMIZERS)
    for j, how in enumerate((*HOW, "clip", "clip passes"))
    if (i + j) % 2 == 0
]
OFTEN = [("flash_lion", "clip passes"), ("flash_factored_adamw", "passes")]


def options_of(name, how):
    """The optimizer of a case, and the options of `train_step`."""
    options = HOW[how.removeprefix("clip").strip() or "whole"]
    tx = clipped(make(name)) if how.startswith("clip") else make(name)
    return tx, {**options, "per_layer": name == "stable_adamw"}


@pytest.mark.parametrize("name, how", rows(dict.fromkeys(OFTEN + CASES), OFTEN))
def test_streamed_bits_are_resident_bits(name, how):
    tx, options = options_of(name, how)
    streamed, resident = (
        offloaded(tx, weights(), kind=kind, **options) for kind in (host.PINNED, "device")
    )
    assert_same(streamed, resident)


@pytest.mark.parametrize("name, how", rows(dict.fromkeys(OFTEN + CASES), OFTEN))
def test_bits_of_weights_on_the_host_are_those_of_weights_on_the_device(name, how):
    """But for codes that XLA's CPU backend rounds elsewhere, with a stack beside the update."""
    tx, options = options_of(name, how)
    streamed, resident = (offloaded(tx, weights(), streams=s, **options) for s in (True, False))
    for a, b in zip(jax.tree.leaves(streamed), jax.tree.leaves(resident), strict=True):
        if a.dtype in (jnp.int8, jnp.uint8):
            gap = np.abs(np.int32(a) - np.int32(b))
            assert gap.max() <= 1 and (gap > 0).sum() <= max(1, REORDERED_CODES * gap.size)
        else:
            np.testing.assert_array_equal(a, b)


def test_a_stack_may_be_made_layer_by_layer():
    params = weights()
    made = []

    def layers():
        for i in range(LAYERS):
            made.append([x for x in jax.live_arrays() if x.shape[:1] == (1,)])
            yield jax.tree.map(lambda x, i=i: np.asarray(x[i]), params["layers"])

    found = release.offload_weights(MODEL, {**params, "layers": layers()}, min_bytes=0)
    assert [len(arrays) - len(made[0]) for arrays in made] == [0, 3, 6]  # moved one by one
    wanted = release.offload_weights(MODEL, jax.tree.map(jnp.array, params), min_bytes=0)
    assert_same(found, wanted)
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(found)}
    assert kinds == {host.PINNED}
    with pytest.raises(ValueError, match="no 'layers' in the parameters"):
        release.offload_weights(MODEL, {"embed": params["embed"]})


def test_a_step_holds_the_weights_of_three_layers_and_copies_them_back(monkeypatch):
    counts, update = [], offload_step.Run.update
    tx, params = make("flash_lion"), release.offload_weights(MODEL, weights(), min_bytes=0)
    state, old = release.offload(tx, MODEL, params, min_bytes=0), params["layers"]["w1"].parts
    shape = old[0].shape

    def counted(*args):
        here = [a for a in jax.live_arrays() if a.sharding.memory_kind != host.PINNED]
        counts.append(sum(a.shape == shape and a.dtype == BF16 for a in here))
        return update(*args)

    monkeypatch.setattr(offload_step.Run, "update", counted)
    step = release.train_step(tx, MODEL, offload=True)
    _, new, _ = step(params, state, batches()[0])
    assert 0 < max(counts) <= 3
    assert {x.sharding.memory_kind for x in jax.tree.leaves(new)} == {host.PINNED}
    assert len(old) == LAYERS and all(x.is_deleted() for x in old)


def test_an_embedding_is_not_read_by_its_backward_pass():
    tx, params = make("flash_lion"), weights()
    step = release.train_step(tx, MODEL, offload=True)
    run = step._begin(params, release.offload(tx, MODEL, params), batches()[0], None, 1)
    names = sorted(params.keys() - {"layers"})
    assert [names[at] for at in run.programs.schedule.reading[0]] == ["embed"]
    assert run.programs.pulling == []


def test_inputs_of_the_last_stage_are_freed(monkeypatch):
    """An update has its dx beside it, and the next input."""
    counts, update = [], offload_step.Run.update
    x = jax.eval_shape(MODEL.first, weights(), batches()[0])

    def counted(*args):
        here = [a for a in jax.live_arrays() if a.sharding.memory_kind != host.PINNED]
        counts.append(sum(a.shape == x.shape and a.dtype == x.dtype for a in here))
        return update(*args)

    monkeypatch.setattr(offload_step.Run, "update", counted)
    offloaded(make("flash_lion"), weights(), steps=1)
    assert len(counts) == LAYERS + 2 and max(counts) <= 2


def test_layers_of_a_long_step_have_the_memory_of_the_head(monkeypatch):
    """Nor are its state and the sums of its gradients on the device together."""
    Run = offload_step.Run
    codes, leaving, complete, arrived = [], [], Run.complete, Run.arrived
    model = dataclasses.replace(MODEL, last=lambda rest, *args: loss(rest["head"], *args))
    params = weights()
    params["head"] = {"embed": params["embed"]}
    shape = params["embed"].shape

    def counted(run, key, *args, **how):
        here = [a for a in jax.live_arrays() if a.sharding.memory_kind != host.PINNED]
        codes.append(sum(a.shape == shape and a.dtype == jnp.int8 for a in here))
        return complete(run, key, *args, **how)

    def read(run, key, brought):
        if key[1] == LAYERS - 1:  # the first layer of the backward pass
            leaving.append(len(run.leaving._stages))
        return arrived(run, key, brought)

    monkeypatch.setattr(Run, "complete", counted)
    monkeypatch.setattr(Run, "arrived", read)
    offloaded(make("flash_lion"), params, steps=1, model=model, micro_batches=4, at_once=2)
    assert codes and max(codes) == 0
    assert leaving[1::2] == [0, 0]


@pytest.mark.parametrize("name", rows(["flash_adamw", "flash_lion"], ["flash_lion"]))
def test_it_is_the_jitted_step(name):
    """Its stages are programs of their own, which XLA fuses like the whole."""
    tx, params = make(name), weights()
    found = offloaded(tx, params)
    assert_same(found, jitted(tx, params))


@pytest.mark.full
def test_two_stacks_an_aux_and_integers_in_x():
    def first(rest, batch):
        return embed(rest, batch), jnp.int32(0)

    def counting(own, rest, x, batch):
        return block(own, rest, x[0], batch), x[1] + 1

    def second(own, rest, x, batch):
        return x[0] + jnp.tanh(x[0] @ own["w"]), x[1]

    def last(rest, x, batch):
        return loss(rest, x[0], batch), {"layers": x[1]}

    model = release.Layered(first, {"layers": counting, "more": second}, last, has_aux=True)
    params = {**weights(), "more": {"w": jnp.full((2, WIDTH, WIDTH), 0.01, BF16)}}
    tx = make("flash_adamw")
    found = offloaded(tx, params, model=model)
    assert_same(found, jitted(tx, params, model))
    assert found[0][1]["layers"] == LAYERS


@pytest.mark.parametrize("how", rows(["micro", "passes"], ["passes"]))
def test_micro_batches_have_the_gradient_of_the_batch(how):
    """With a rate of 1 the step of plain SGD is the gradient."""
    tx, params = lowmem.flash_sgd(1.0), masters()
    value, found, _ = offloaded(tx, params, steps=1, **HOW[how])
    wanted, gradients = jax.jit(jax.value_and_grad(MODEL))(params, batches()[0])
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    for old, new, g in zip(*map(jax.tree.leaves, (params, found, gradients)), strict=True):
        np.testing.assert_allclose(old - new, g, atol=1e-6)


def test_the_dtype_of_the_loss_does_not_round_the_share_of_a_micro_batch():
    """Of one of three, in bf16."""
    tx, batch = lowmem.flash_sgd(1.0), jax.tree.map(lambda x: x[:3], batches()[0])

    def moved(dtype):
        model = dataclasses.replace(MODEL, last=lambda *args: loss(*args).astype(dtype))
        params = masters()
        state = release.offload(tx, model, params)
        return release.train_step(tx, model, offload=True, micro_batches=3)(params, state, batch)[1]

    assert_same(moved(BF16), moved(jnp.float32))


def test_micro_batches_of_a_model_with_an_aux_return_the_loss():
    def last(rest, x, batch):
        return loss(rest, x, batch), x.mean()

    model = dataclasses.replace(MODEL, last=last, has_aux=True)
    tx, params = lowmem.flash_sgd(1.0), masters()
    found, wanted = (
        offloaded(tx, params, steps=1, model=m, micro_batches=2) for m in (model, MODEL)
    )
    assert_same(found, wanted)


# ---- compiling ahead -----------------------------------------------------------------------------
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("how", rows([*HOW, "clip", "clip passes"], ["micro", "clip passes"]))
def test_compiled_steps_compile_nothing(how, streams):
    """Nor does compiling allocate; the bits are those of steps that compile when called."""
    tx, options = options_of("flash_adamw", how)
    step = release.train_step(tx, MODEL, offload=True, **options)
    params = jax.device_put(weights(), jax.devices()[0])
    like, some = jax.eval_shape(lambda: (weights(), batches()[0]))
    like = jax.tree.map(lambda x, p: x.update(sharding=p.sharding), like, params)
    gc.collect()
    arrays = len(jax.live_arrays())
    if streams:
        like = release.offload_weights(MODEL, like, min_bytes=0)
    step.compile(like, release.offload(tx, MODEL, like, min_bytes=0), some)
    assert len(jax.live_arrays()) <= arrays
    if streams:
        params = release.offload_weights(MODEL, params, min_bytes=0)
    state, values = release.offload(tx, MODEL, params, min_bytes=0), batches(2)

    def steps(params, state):
        for batch in values:
            value, params, state = step(params, state, batch)
        return value, params, state

    (value, params, state), made = programs(lambda: steps(params, state))
    assert made == 0
    assert_same((value, on_device(params), on_device(state)), offloaded(tx, weights(), **options))


def test_arrays_are_compiled_as_shapes_are():
    tx, params, (batch,) = make("flash_adamw"), weights(), batches()
    state = release.offload(tx, MODEL, params, min_bytes=0)
    step = release.train_step(tx, MODEL, offload=True)
    step.compile(params, state, batch)
    assert programs(lambda: step(params, state, batch))[1] == 0


# ---- clipping ------------------------------------------------------------------------------------
def test_the_global_norm_is_that_of_the_ordinary_step():
    tx, params = clipped(lowmem.flash_sgd(1.0), 0.5), masters()
    wanted = run(ordinary(tx), params, tx.init(params), steps=1)[1]
    for found in (
        jitted(tx, params, steps=1)[1],
        offloaded(tx, params, steps=1, micro_batches=2, at_once=1)[1],
    ):
        moved = jax.tree.map(lambda a, b: a - b, params, found)
        assert float(optax.tree.norm(moved)) == pytest.approx(0.5, rel=1e-5)
        for one, other in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-6)


def test_a_layer_is_clipped_by_its_own_norm():
    """And each leaf outside of layers, also if the first stage reads two of them."""

    def first(rest, batch):
        return embed(rest, batch) + rest["unread"].sum()

    limit, params = 0.05, masters()
    tx, model = lowmem.flash_sgd(1.0), dataclasses.replace(MODEL, first=first)
    step = release.train_step(tx, model, clip_layer_norm=limit)
    _, found, _ = run(step, params, tx.init(params), steps=1)
    gradients = jax.jit(jax.grad(model))(params, batches()[0])

    def norms(tree):
        in_layers = jax.vmap(lambda own: optax.tree.norm(own))(tree["layers"])
        return [*in_layers, *(optax.tree.norm(tree[n]) for n in ("embed", "shared", "unread"))]

    before = np.array(norms(gradients))
    after = np.array(norms(jax.tree.map(lambda a, b: a - b, params, found)))
    np.testing.assert_allclose(after, np.minimum(before, limit), rtol=1e-4)
    assert (before > limit).any()


def test_the_norm_does_not_make_xla_keep_gradients():
    """Both passes compute the gradients; merged, those of a pass would wait for the other."""
    tx, params = lowmem.flash_sgd(1.0), masters()
    like = jax.eval_shape(lambda p: (p, tx.init(p)), params)

    def products(tx, state):
        step = jax.jit(release.train_step(tx, MODEL))
        text = step.lower(like[0], state, batches()[0]).compile().as_text()
        return text.count(" dot(") + text.count("__onednn") + text.count("$dot")

    once = products(tx, like[1])
    assert products(clipped(tx), (optax.EmptyState(), like[1])) > once


# ---- where arrays are ----------------------------------------------------------------------------
def test_the_state_is_on_the_host_and_the_old_one_deleted():
    tx, params = make("flash_lion"), weights()
    state = release.offload(tx, MODEL, params, min_bytes=1000)
    kinds = jax.tree.map(lambda x: x.sharding.memory_kind, state)
    assert set(kinds.mu["layers"]["w1"].parts) == {"pinned_host"}
    assert set(kinds.mu["layers"]["norm"].parts) == {kinds.count}  # too small
    old = state.mu["layers"]["w1"].parts
    step = release.train_step(tx, MODEL, offload=True)
    _, _, new = step(params, state, batches()[0])
    assert jax.tree.leaves(kinds) == [x.sharding.memory_kind for x in jax.tree.leaves(new)]
    assert len(old) == LAYERS and all(x.is_deleted() for x in (*old, params["layers"]["w1"]))


def test_a_state_is_moved_as_it_is():
    tx, params = make("flash_lion"), weights()
    state = jitted(tx, params, steps=1)[2]
    wanted = jax.tree.map(np.asarray, state)
    moved = release.offload(tx, MODEL, params, state, min_bytes=0)
    assert_same(on_device(moved), wanted)
    assert_same(on_device(release.offload(tx, MODEL, params)), tx.init(params))


def test_a_stage_waits_for_the_one_two_before_it(monkeypatch):
    waited = []
    monkeypatch.setattr(jax, "block_until_ready", waited.append)
    ahead = host.RunAhead()
    for stage in range(4):
        ahead.dispatched(stage)
        assert waited == list(range(stage))


@pytest.mark.parametrize("name", rows(list(lowmem.OPTIMIZERS), ["flash_adamw"]))
def test_the_ordinary_step_streams_a_state_by_parameter(name):
    tx, params = clipped(make(name)), weights()
    gradients = jax.tree.map(lambda p: jnp.cos(100 * p.astype(jnp.float32)), params)
    state = tx.init(params)
    pinned = SingleDeviceSharding(jax.devices()[0], memory_kind=host.PINNED)
    moved = jax.device_put(state, pinned)
    for _ in range(2):
        wanted, state = lowmem.step(tx, gradients, state, params)
        found, moved = lowmem.step(tx, gradients, moved, params)
        assert_same(found, wanted)
        params = wanted
    arrays = [x for x in jax.tree.leaves(moved) if x.ndim]
    assert arrays and all(map(host.is_on_host, arrays))
    assert_same(on_device(moved), state)
    with pytest.raises(ValueError, match="outside of jit, which streams it"):
        jax.jit(lowmem.step, static_argnums=0)(tx, gradients, moved, params)


# ---- checkpoints ---------------------------------------------------------------------------------
def test_a_saved_state_is_resumed_on_the_host_and_on_the_device(tmp_path):
    tx, params = make("flash_lion"), weights()
    state = release.offload(tx, MODEL, params, min_bytes=0)
    streamed = release.train_step(tx, MODEL, offload=True)
    first, second = batches(2)
    _, params, state = streamed(params, state, first)
    lowmem.checkpoint.save(tmp_path, tx, params, state, step=1)
    wanted = streamed(params, state, second)

    device = jax.devices()[0]
    pinned = SingleDeviceSharding(device, memory_kind=host.PINNED)
    params, state = lowmem.checkpoint.restore(tmp_path, tx, weights(), shardings=pinned)
    assert all(map(host.is_on_host, jax.tree.leaves(state)))
    state = release.offload(tx, MODEL, params, state, min_bytes=0)
    value, params, state = streamed(params, state, second)
    wanted = (*wanted[:2], on_device(wanted[2]))
    assert_same((value, params, on_device(state)), wanted)

    params, state = lowmem.checkpoint.restore(tmp_path, tx, weights())
    assert not any(map(host.is_on_host, jax.tree.leaves(state)))
    step = jax.jit(release.train_step(tx, MODEL), compiler_options=QUICK_COMPILE)
    assert_same(step(params, state, second), wanted)


def test_streamed_weights_are_resumed_on_the_host_and_on_the_device(tmp_path):
    tx = make("flash_lion")
    params = release.offload_weights(MODEL, weights(), min_bytes=0)
    state = release.offload(tx, MODEL, params, min_bytes=0)
    streamed = release.train_step(tx, MODEL, offload=True)
    first, second = batches(2)
    _, params, state = streamed(params, state, first)
    lowmem.checkpoint.save(tmp_path, tx, params, state, step=1)
    value, params, state = streamed(params, state, second)
    wanted = value, on_device(params), on_device(state)

    pinned = SingleDeviceSharding(jax.devices()[0], memory_kind=host.PINNED)
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=pinned), weights()
    )
    params, state = lowmem.checkpoint.restore(tmp_path, tx, like, shardings=pinned)
    assert all(map(host.is_on_host, jax.tree.leaves((params, state))))
    params = release.offload_weights(MODEL, params, min_bytes=0)
    state = release.offload(tx, MODEL, params, state, min_bytes=0)
    value, params, state = streamed(params, state, second)
    assert_same((value, on_device(params), on_device(state)), wanted)

    params, state = lowmem.checkpoint.restore(tmp_path, tx, weights())
    step = jax.jit(release.train_step(tx, MODEL), compiler_options=QUICK_COMPILE)
    assert_same(step(params, state, second), wanted)


# ---- limits --------------------------------------------------------------------------------------
def test_too_little_memory_is_an_error_that_says_how_much(monkeypatch):
    tx, params = make("flash_lion"), weights()
    state = release.offload(tx, MODEL, params, min_bytes=0)
    monkeypatch.setattr(room, "free_bytes", lambda: 1000)
    with pytest.raises(MemoryError, match=r"the optimizer's state needs 0.00 GiB of pinned"):
        release.offload(tx, MODEL, params, min_bytes=0)
    step = release.train_step(tx, MODEL, offload=True, micro_batches=4, at_once=2)
    for _ in range(2):
        with pytest.raises(MemoryError, match=r"layer inputs and sums of gradients needs"):
            step(params, state, batches()[0])
    assert not any(x.is_deleted() for x in jax.tree.leaves((params, state)))
    with pytest.raises(MemoryError, match=r"a copy of the weights needs 0.00 GiB"):
        release.offload_weights(MODEL, params)
    monkeypatch.setattr(room, "free_bytes", lambda: 10**5)
    like = jax.eval_shape(lambda: params)
    like = release.offload_weights(MODEL, like, min_bytes=0)
    shapes = release.offload(tx, MODEL, like, min_bytes=0)
    with pytest.raises(MemoryError, match="weights and state, with a step's layer inputs"):
        step.compile(like, shapes, jax.tree.map(lambda x: jnp.tile(x, (50, 10)), batches()[0]))


def test_what_xla_pins_at_most_is_in_the_error(monkeypatch):
    gpu = type("Device", (), {"platform": "gpu"})()
    monkeypatch.setattr(room, "free_bytes", lambda: None)
    room.check_room(40 * 2**30, "it", gpu, 24 * 2**30)
    with pytest.raises(MemoryError, match=r"64 GiB at most: set XLA_\w+_GB=74 in"):
        room.check_room(41 * 2**30, "it", gpu, 24 * 2**30)
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "74")
    room.check_room(41 * 2**30, "it", gpu, 24 * 2**30)


def test_free_memory_is_known_here():
    assert room.free_bytes() > 2**20


def test_bad_arguments():
    tx, params = make("flash_lion"), weights()
    with pytest.raises(ValueError, match="need offload=True"):
        release.train_step(tx, MODEL, micro_batches=2)
    with pytest.raises(ValueError, match="without mesh and specs"):
        release.train_step(tx, MODEL, offload=True, specs=params)
    with pytest.raises(ValueError, match="number of micro-batches, at least 1, got 0"):
        release.train_step(tx, MODEL, offload=True, micro_batches=0)
    with pytest.raises(ValueError, match="leave out one"):
        release.train_step(clipped(tx), MODEL, clip_layer_norm=1.0)
    with pytest.raises(ValueError, match="one array for all layers.*release.offload"):
        release.train_step(tx, MODEL, offload=True)(params, tx.init(params), batches()[0])
    with pytest.raises(ValueError, match="chain of two links"):
        release.train_step(clipped(tx), MODEL)(params, tx.init(params), batches()[0])
    odd = release.train_step(tx, MODEL, offload=True, micro_batches=3)
    with pytest.raises(ValueError, match="divisible by 3 micro-batches"):
        odd(params, release.offload(tx, MODEL, params), batches()[0])
    devices = jax.devices()
    if len(devices) > 1:
        apart = {**params, "unread": jax.device_put(params["unread"], devices[1])}
        with pytest.raises(ValueError, match="streamed to one device, .* on 2"):
            release.offload(tx, MODEL, apart)
