"""Levanter's `Trainer` on a small Llama, with `type: flash_adamw`: FSDP by names, checkpoints."""

import common  # isort: skip

import dataclasses
import tempfile

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jmp
from levanter.checkpoint import load_checkpoint, save_checkpoint
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmExample
from levanter.optim.config import AdamConfig, OptimizerConfig
from levanter.tracker import NoopConfig
from levanter.trainer import Trainer, TrainerConfig

import optax_lowmem.levanter  # noqa: F401

CONFIG = LlamaConfig(max_seq_len=32, hidden_dim=160, intermediate_dim=320, num_layers=2,
                     num_heads=4, num_kv_heads=2, gradient_checkpointing=False)  # fmt: skip
VOCABULARY, BATCH = hax.Axis("vocab", 256), hax.Axis("batch", 8)


def trainer_of(impl):
    weights = "f32" if impl != common.OURS_BF16 else "bf16"
    config = TrainerConfig(
        mp=jmp.get_policy(f"p={weights},c=f32"), num_train_steps=common.STEPS,
        train_batch_size=BATCH.size, tracker=NoopConfig(), id="run", log_jaxprs=False,
        log_xla_hlo=False,
    )  # fmt: skip
    options = dict(learning_rate=common.RATE / 8, warmup=0.0, lr_schedule="constant")
    make = AdamConfig
    if impl != common.PLAIN:
        make = OptimizerConfig.get_choice_class("flash_adamw")  # as a YAML file names it
    optimizer = make(**options).build(common.STEPS)
    loss = lambda model, example, key=None: model.compute_next_token_loss(example, key=key)  # noqa: E731
    return Trainer(config, optimizer, loss, add_default_hooks=False)


def start(trainer):
    example = LmExample.causal(hax.zeros(CONFIG.max_Pos, dtype=jnp.int32))
    weight = example.loss_weight.broadcast_axis(BATCH)
    tokens = hax.named(common.tokens(BATCH.size, 32, VOCABULARY.size), (BATCH, CONFIG.max_Pos))
    example = dataclasses.replace(example, tokens=tokens, loss_weight=weight)
    key = jax.random.PRNGKey(0)  # Levanter saves no typed keys
    init = lambda: CONFIG.build(VOCABULARY, key=key)  # noqa: E731
    return example, trainer.initial_state(key, model_init=init)


def train(impl):
    with trainer_of(impl) as trainer:
        example, state = start(trainer)
        losses = []
        for _ in range(common.STEPS):
            info = trainer.train_step(state, example)
            losses.append(float(info.loss))
            state = info.state
    arrays = eqx.filter((state.model, state.opt_state), eqx.is_array)
    size = sum(x.size for x in jax.tree.leaves(eqx.filter(state.model, eqx.is_inexact_array)))
    return losses, arrays, size


def resumes():
    """Through Levanter's checkpoints."""
    with trainer_of(common.OURS_BF16) as trainer, tempfile.TemporaryDirectory() as folder:
        example, state = start(trainer)
        for _ in range(2):
            state = trainer.train_step(state, example).state
        save_checkpoint(state, 2, folder)
        whole = trainer.train_step(state, example).state
        _, fresh = start(trainer)
        restored = load_checkpoint(fresh, folder, mesh=trainer.device_mesh)
        resumed = trainer.train_step(restored, example).state
    common.assert_same_bits(*(eqx.filter(s.model, eqx.is_array) for s in (whole, resumed)))


if __name__ == "__main__":
    common.compare("marin-levanter", train)
    resumes()
