"""easydel's `Trainer` on a small Llama: FSDP by its rules, the fused step."""

import common  # isort: skip

import dataclasses
import tempfile

import easydel as ed
import jax
import jax.numpy as jnp
from datasets import Dataset
from flax import nnx

import optax_lowmem as lowmem

TOKENS = common.tokens(8, 32, 256).tolist()
DATA = Dataset.from_dict({
    "input_ids": TOKENS * common.STEPS,
    "attention_mask": [[1] * len(row) for row in TOKENS] * common.STEPS,
})  # fmt: skip
CONFIG = dict(vocab_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
              max_position_embeddings=64, use_cache=False,
              sharding_axis_dims=(1, common.DEVICES, 1, 1, 1))  # fmt: skip


class Trainer(ed.Trainer):
    def configure_model(self):
        made = super().configure_model()
        return dataclasses.replace(made, tx=lowmem.fuse_updates(lowmem.flash_adamw(made.scheduler)))


def run(impl, folder):
    losses = []
    make = ed.Trainer if impl == common.PLAIN else Trainer

    class Recorded(make):
        def on_step_end(self, state, metrics, step):
            losses.append(float(metrics.loss))
            return super().on_step_end(state, metrics, step)

    model = ed.LlamaForCausalLM(
        config=ed.LlamaConfig(hidden_size=160, intermediate_size=320, **CONFIG),
        dtype=jnp.float32, param_dtype=common.DTYPES[impl], rngs=nnx.Rngs(0),
    )  # fmt: skip
    arguments = ed.TrainingArguments(
        save_directory=folder, model_name="run", max_training_steps=common.STEPS,
        num_train_epochs=1, total_batch_size=len(TOKENS), max_length=32, learning_rate=common.RATE,
        shuffle_train_dataset=False, do_last_save=False, progress_bar_type="json", use_wandb=False,
    )  # fmt: skip
    trainer = Recorded(arguments=arguments, model=model.shard_model(), dataset_train=DATA)
    return losses, trainer.train().state


def train(impl):
    with tempfile.TemporaryDirectory() as folder:
        losses, state = run(impl, folder)
    size = sum(x.size for x in jax.tree.leaves(state.graphstate))
    return losses, (state.graphstate, state.opt_state), size


if __name__ == "__main__":
    common.compare("easydel", train)
