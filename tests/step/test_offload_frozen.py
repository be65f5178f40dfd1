"""Adapters beside a frozen base in host memory: the bits are those of a base on the device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import SingleDeviceSharding

import optax_lowmem as lowmem
from optax_lowmem import layers, release
from optax_lowmem._src.arrays import host
from optax_lowmem._src.training.release import offload_step
from optax_lowmem._src.training.release.model import joined
from tests.compilation import QUICK_COMPILE
from tests.contract_cases import assert_same

LAYERS, WIDTH, WORDS = 3, 64, 17
TX = lowmem.flash_adamw(1e-2)
BATCH = np.arange(8).reshape(2, 4)
FROZEN = ["bf16", "nf4"]


def layer(own, rest, x, batch):
    base, adapter = own["q"]["kernel"], own["q"]
    is_quantized = isinstance(base, layers.nf4.NF4Array)
    y = layers.nf4.matmul(x, base) if is_quantized else x @ base
    return x + jnp.tanh(y + x @ adapter["a"] @ adapter["b"]) * rest["scale"]


def frozen_layer(own, rest, x, batch):
    return x + jnp.tanh(x @ own["w"])


def loss(rest, x, batch):
    return jnp.mean((x * rest["norm"] @ rest["embed"].T).astype(jnp.float32) ** 2)


STACKS = {"layers": layer, "frozen": frozen_layer}  # not in the order of the parameters
MODEL = release.Layered(lambda rest, batch: rest["embed"][batch], STACKS, loss)


def parameters(frozen="bf16"):
    """Trained and frozen parameters; of the former, one is outside the layers."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(0, 0.1, shape), jnp.bfloat16)  # noqa: E731
    kernel = draw(LAYERS, WIDTH, WIDTH)
    kernel = layers.nf4.quantize(kernel) if frozen == "nf4" else kernel
    base = {"embed": draw(WORDS, WIDTH), "scale": draw(1, 1, WIDTH)}
    adapters = {"a": draw(LAYERS, WIDTH, 2), "b": draw(LAYERS, 2, WIDTH)}
    params = {"norm": jnp.ones((1, 1, WIDTH), jnp.bfloat16), "layers": {"q": adapters}}
    base |= {"frozen": {"w": draw(2, WIDTH, WIDTH)}, "layers": {"q": {"kernel": kernel}}}
    return params, base


def start(frozen, streams=True):
    """Parameters, state and frozen parameters."""
    params, base = parameters(frozen)
    if streams:
        base = release.offload_weights(MODEL, base, min_bytes=0)
    return params, release.offload(TX, MODEL, params, memory_kind="device"), base


STEP = release.train_step(TX, MODEL, offload=True)


def steps(params, state, base, number=2, step=STEP):
    """(loss, parameters, state) after some steps, without `PerLayer`."""
    for _ in range(number):
        value, params, state = step(params, state, BATCH, base)
    return value, params, host.stacked(state)


@pytest.mark.parametrize("frozen", FROZEN)
def test_it_is_the_ordinary_step(frozen):
    """Up to f32 rounding; wherever the base is, with the same bits."""
    found, same = (steps(*start(frozen, streams)) for streams in (True, False))
    assert_same(found, same)
    params, base = parameters(frozen)

    def ordinary(params, state, base):
        value, grads = jax.value_and_grad(MODEL)(params, BATCH, base)
        return value, *lowmem.step(TX, grads, state, params)

    step, state = jax.jit(ordinary, compiler_options=QUICK_COMPILE), TX.init(params)
    for _ in range(2):
        value, params, state = step(params, state, base)
    np.testing.assert_allclose(found[0], value, rtol=1e-5)
    for one, other in zip(*map(jax.tree.leaves, (found[1], params)), strict=True):
        np.testing.assert_allclose(one, other, rtol=2**-7, atol=1e-5)


def test_clipped_micro_batches_have_the_bits_of_a_base_on_the_device():
    tx = lowmem.chain(optax.clip_by_global_norm(1e-3), TX)
    step = release.train_step(tx, MODEL, offload=True, micro_batches=2, at_once=1)
    found, same = (start("nf4", streams) for streams in (True, False))
    found, same = (
        steps(params, (optax.EmptyState(), state), base, 1, step)
        for params, state, base in (found, same)
    )
    assert_same(found, same)


def test_three_layers_of_the_base_are_on_the_device_and_it_stays_on_the_host(monkeypatch):
    counts, back = [], offload_step.Run.update
    params, state, base = start("nf4")
    shape = base["layers"]["q"]["kernel"].codes.parts[0].shape

    def counted(*args):
        here = [x for x in jax.live_arrays() if x.sharding.memory_kind != host.PINNED]
        counts.append(sum(x.shape == shape and x.dtype == jnp.uint8 for x in here))
        return back(*args)

    monkeypatch.setattr(offload_step.Run, "update", counted)
    _, new, state = STEP(params, state, BATCH, base)
    assert 0 < max(counts) <= 3
    assert all(map(host.is_on_host, jax.tree.leaves(base)))
    assert not any(map(host.is_on_host, jax.tree.leaves((new, state))))
    assert jax.tree.structure(new) == jax.tree.structure(params)


def test_adapters_are_resumed_and_compiled_ahead(tmp_path):
    params, state, base = start("nf4")
    step = release.train_step(TX, MODEL, offload=True)
    step.compile(*jax.tree.map(host.shape_of, (params, state)), BATCH, base)
    _, params, state = step(params, state, BATCH, base)
    lowmem.checkpoint.save(tmp_path, TX, params, state, step=1)
    value, params, state = step(params, state, BATCH, base)
    assert len(step._programs) == 1
    restored = lowmem.checkpoint.restore(tmp_path, TX, parameters()[0])
    moved = release.offload(TX, MODEL, *restored, memory_kind="device")
    assert_same(steps(restored[0], moved, base, 1), (value, params, host.stacked(state)))
    assert step.loss(params, state, BATCH, base) < value


def test_trees_with_none_are_joined():
    params, base = parameters("nf4")
    params["layers"]["q"]["kernel"] = base["norm"] = None
    wanted, found = MODEL.take_apart(*parameters("nf4")), MODEL.take_apart(params, base)
    assert_same(found.stacks["layers"].tree, wanted.stacks["layers"].tree)
    assert joined([params, 1, None], [None, None, (2,)]) == [params, 1, (2,)]


def test_bad_trees():
    params, state, base = start("bf16")
    with pytest.raises(ValueError, match="'layers/q/a' is in the trained .* frozen ones: leave"):
        STEP(params, state, BATCH, {**base, "layers": {"q": params["layers"]["q"]}})
    few = {**base, "layers": {"q": {"kernel": jnp.zeros((2, WIDTH, WIDTH))}}}
    with pytest.raises(ValueError, match="'layers/q/kernel' has 2 layers on axis 0 and .* has 3"):
        STEP(params, state, BATCH, few)
    devices = jax.devices()
    if len(devices) > 1:
        elsewhere = jax.device_put(base, SingleDeviceSharding(devices[1]))
        with pytest.raises(ValueError, match="streamed to one device"):
            STEP(jax.device_put(params, devices[0]), state, BATCH, elsewhere)
