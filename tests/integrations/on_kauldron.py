"""Kauldron's train step on a small Flax model: FSDP, the fused step."""

import common  # isort: skip

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from kauldron import kd, kontext

import optax_lowmem as lowmem

TOKENS = common.tokens(8, 32, 256)


class Model(nn.Module):
    dtype: jnp.dtype
    tokens: kontext.Key = kontext.REQUIRED

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(256, 160, param_dtype=self.dtype)(tokens)
        x = nn.gelu(nn.Dense(320, param_dtype=self.dtype)(x.astype(jnp.float32)))
        return {"logits": nn.Dense(256, param_dtype=self.dtype)(x)}


def trainer_of(impl):
    learning_rate = 10 * common.RATE  # a model without attention learns slowly
    if impl == common.PLAIN:
        optimizer = optax.adamw(learning_rate)
    else:
        optimizer = lowmem.fuse_updates(lowmem.flash_adamw(learning_rate))
    loss = kd.losses.SoftmaxCrossEntropyWithIntLabels(logits="preds.logits", labels="batch.labels")
    batch = {"tokens": TOKENS[:, :-1], "labels": TOKENS[:, 1:, None]}
    shards = kd.sharding.FSDPSharding(min_size_to_shard_mb=0)
    return kd.train.Trainer(
        seed=0, train_ds=kd.data.InMemoryPipeline(loader=lambda: batch, batch_size=8),
        num_train_steps=common.STEPS, train_losses={"loss": loss}, workdir="/tmp/unused",
        model=Model(common.DTYPES[impl], tokens="batch.tokens"), optimizer=optimizer,
        sharding=kd.sharding.ShardingStrategy(params=shards, opt_state=shards),
    )  # fmt: skip


def train(impl):
    trainer, losses = trainer_of(impl), []
    state = trainer.init_state()
    for _, batch in zip(range(common.STEPS), trainer.train_ds, strict=False):
        batch = kd.sharding.device_put(batch, trainer.sharding.batch)
        state, aux = trainer.trainstep.step(state, batch, return_losses=True)
        losses.append(float(aux.compute().loss_values["losses/loss"]))
    arrays = state.params, state.opt_state
    return losses, arrays, sum(x.size for x in jax.tree.leaves(state.params))


if __name__ == "__main__":
    common.compare("kauldron", train)
