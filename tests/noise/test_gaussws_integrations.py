"""gaussws_noise with Flax, Orbax, exports, and arrays on Explicit mesh axes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

pytest.importorskip("flax")

from flax import nnx  # noqa: E402

import optax_lowmem as lowmem  # noqa: E402
import optax_lowmem.flax  # noqa: E402
from optax_lowmem import gaussws  # noqa: E402
from optax_lowmem._src.kernels import platform  # noqa: E402
from optax_lowmem._src.layers.noise import kernels  # noqa: E402
from optax_lowmem._src.training.flax import as_pure  # noqa: E402
from tests.lowering import gpu_mesh, kernels_in, lower_for_cuda  # noqa: E402
from tests.noise.test_gaussws_transform import DOWN, UP, equal, leaf, noisy, start, stepper  # noqa: E402
from tests.tiers import rows  # noqa: E402

BF16 = jnp.bfloat16


def trained(tx, steps=2, dtype=BF16):
    params, state = lowmem.init(tx, start(), dtype)
    for seed in range(steps):
        params, state = stepper(tx)(start(seed + 1), state, params)
    return params, state


def test_checkpoints(tmp_path):
    tx = noisy(lowmem.flash_adamw(1e-2), ["down", "up"])
    params, state = trained(tx)
    lowmem.checkpoint.save(tmp_path / "run", tx, params, state, 2)
    back = lowmem.checkpoint.restore(tmp_path / "run", tx, params)
    equal(back, (params, state))
    equal(stepper(tx)(start(9), back[1], back[0]), stepper(tx)(start(9), state, params))
    other = noisy(lowmem.flash_adamw(1e-2), "down")
    with pytest.raises(ValueError, match="clean"):
        lowmem.checkpoint.restore(tmp_path / "run", other, params)


def test_exports_have_no_noise(tmp_path):
    from safetensors.numpy import load_file

    tx = noisy()
    params, state = trained(tx)
    clean = gaussws.clean_params(params, state)
    assert (leaf(clean, DOWN) != leaf(params, DOWN)).any()
    lowmem.checkpoint.export(tmp_path / "bf16", params, state, BF16)
    found = load_file(tmp_path / "bf16")[DOWN.replace("/", ".")]
    np.testing.assert_array_equal(found, np.asarray(leaf(clean, DOWN)))
    lowmem.checkpoint.export(tmp_path / "f32", params, state)
    found = load_file(tmp_path / "f32")[DOWN.replace("/", ".")]
    np.testing.assert_array_equal(found, leaf(lowmem.master_params(params, state), DOWN))


def test_nnx_optimizer():
    model = nnx.Linear(64, 32, rngs=nnx.Rngs(0))
    given = model.kernel[...]
    tx = lowmem.gaussws_noise(lowmem.flash_adamw(1e-2), "kernel")
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    assert (model.kernel[...] == given).all()  # Flax's own makes no first noise
    for _ in range(2):
        grads = nnx.grad(lambda m: jnp.mean(m(jnp.ones((4, 64))) ** 2))(model)
        optimizer.update(model, grads)
    params = nnx.state(model, nnx.Param)
    clean = gaussws.clean_params(params, as_pure(optimizer.opt_state))
    assert (nnx.to_pure_dict(clean)["kernel"] != model.kernel[...]).mean() > 0.2


def test_state_is_found_by_optax():
    """tree_map_params visits what is like the parameters."""
    tx = noisy(optax.adamw(1e-2))
    params, state = lowmem.init(tx, start(), jnp.float32)
    marked = optax.tree.map_params(tx, lambda x: "of a parameter", state)
    assert leaf(marked.clean, DOWN) == leaf(marked.bits, UP) == "of a parameter"
    assert marked.count == 0


# ---- on a mesh -----------------------------------------------------------------------------------
SPECS = [P("a", "b"), P("b"), P(("b", "a"))]  # the last cuts through blocks


def laid(spec, kind):
    """A mesh, and weights, state and gradients of 128 x 256 on it and off it."""
    mesh = jax.make_mesh((4, 2), ("a", "b"), (kind,) * 2)
    tx = noisy(optax.sgd(1e-2), ["down", "up"])
    params, state = lowmem.init(tx, start(shape=(128, 256)), jnp.float32)
    grads = start(1, (128, 256))
    specs = {"mlp": {"up": {"kernel": spec}, "down": {"kernel": spec}}, "norm": {"scale": P()}}
    places = jax.tree.map(lambda s: NamedSharding(mesh, s), specs)
    of_state = lowmem.sharding.state_shardings(tx, params, places)
    own = (grads, state, params)
    return mesh, tx, specs, own, jax.device_put(own, (places, of_state, places))


def check_laid(found, wanted, like):
    for a, b, c in zip(*map(jax.tree.leaves, (found, wanted, like)), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)
        if c.ndim:
            assert a.sharding.is_equivalent_to(c.sharding, a.ndim)


@pytest.mark.parametrize("spec", rows(((spec,) for spec in SPECS[1:]), [(SPECS[1],)]), ids=str)
def test_on_explicit_axes(spec):
    mesh, tx, _, own, laid_out = laid(spec, AxisType.Explicit)
    wanted = stepper(tx)(*own)
    with jax.set_mesh(mesh):
        found = stepper(tx)(*laid_out)
        check_laid(found, wanted, (laid_out[2], laid_out[1]))


@pytest.mark.parametrize("spec", SPECS[:2], ids=str)
def test_told_where_it_lies(spec, monkeypatch):
    """Each device samples its part, as a kernel would, and nothing is gathered."""
    mesh, tx, specs, own, laid_out = laid(spec, AxisType.Auto)
    parts = []
    plain = kernels.sample_plain

    def seen(w, *rest, **more):
        parts.append(w.shape)
        return plain(w, *rest, **more)

    monkeypatch.setattr(kernels, "sample_plain", seen)
    step = jax.jit(functools.partial(lowmem.step, tx, mesh=mesh, specs=specs))
    found = step(*laid_out)
    check_laid(found, stepper(tx)(*own), (laid_out[2], laid_out[1]))
    assert NamedSharding(mesh, spec).shard_shape((128, 256)) in parts
    text = step.lower(*laid_out).compile().as_text()
    assert not any(word in text for word in ("all-gather", "all-to-all", "collective-permute"))


def test_kernels_on_a_mesh(monkeypatch):
    """With a mesh of eight GPUs and partition specs, each device runs both kernels."""
    monkeypatch.setattr(platform, "no_gpu_reason", lambda: None)
    tx = noisy(optax.sgd(1e-2))
    mesh = gpu_mesh(a=8)
    begin = functools.partial(lowmem.init, tx, dtype=BF16, allow_rounding=True)
    shapes = jax.eval_shape(begin, start(shape=(256, 128)))
    specs = {"mlp": {"up": {"kernel": P("a")}, "down": {"kernel": P("a")}}, "norm": {"scale": P()}}
    step = functools.partial(lowmem.step, tx, mesh=mesh, specs=specs)
    text = lower_for_cuda(step, shapes[0], shapes[1], shapes[0], mesh=mesh)
    assert sorted(kernels_in(text)) == ["noise_sums", "sample_weights"]
