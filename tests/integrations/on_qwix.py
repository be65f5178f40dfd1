"""QLoRA by Qwix in Flax NNX: its NF4 weights are frozen, `lowmem.flash_adamw` trains adapters."""

import common  # isort: skip

import jax
import jax.numpy as jnp
import qwix
from flax import nnx

import optax_lowmem as lowmem
from optax_lowmem.flax import Optimizer


def start():
    layers = [nnx.Linear(64, 256, rngs=nnx.Rngs(0)), nnx.Linear(256, 64, rngs=nnx.Rngs(1))]
    model = nnx.Sequential(layers[0], jax.nn.gelu, layers[1])
    inputs = jax.random.normal(jax.random.key(0), (32, 64))
    rule = qwix.LoraRule(module_path=".*", weight_qtype="nf4", tile_size=64, rank=8, alpha=16.0)
    model = qwix.apply_lora_to_model(model, qwix.LoraProvider([rule]), inputs, rngs=nnx.Rngs(2))
    optimizer = Optimizer(model, lowmem.flash_adamw(1e-2), wrt=nnx.LoRAParam)
    return model, optimizer, inputs


def base_of(model):
    frozen = nnx.state(model, nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam)))
    return [jnp.copy(leaf) for leaf in jax.tree.leaves(frozen)]


@nnx.jit
def train_step(model, optimizer, inputs):
    def loss_fn(model):
        return jnp.mean((model(inputs) - jnp.sin(inputs)) ** 2)

    loss, grads = nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
    optimizer.update(model, grads)
    return loss


if __name__ == "__main__":
    model, optimizer, inputs = start()
    before = base_of(model)
    losses = [float(train_step(model, optimizer, inputs)) for _ in range(common.STEPS)]
    assert losses[-1] < 0.2 * losses[0], losses
    assert sum(leaf.dtype == jnp.uint4 for leaf in before) == 2
    common.assert_same_bits(before, base_of(model))
    print(f"qwix: loss {losses[0]:.3f} to {losses[-1]:.3f}")
