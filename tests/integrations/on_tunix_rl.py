"""tunix's DPO and GRPO on a small Llama: `optax.adamw` in f32; `flash_adamw` in bf16.

`on_tunix.py` runs this. Bytes per parameter are those of the actor, the reference and the state.
"""

import common  # isort: skip

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.models.llama3 import model as llama
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.sft.dpo.dpo_trainer import DPOTrainer, DPOTrainingConfig, TrainingInput
from tunix.tests.test_common import MockVocab

import optax_lowmem as lowmem
from optax_lowmem.flax import substitute

WORDS = MockVocab()
MESH = jax.sharding.Mesh(np.array(jax.devices()).reshape(common.DEVICES, 1), ("fsdp", "tp"))
CONFIG = llama.ModelConfig(
    num_layers=1, vocab_size=WORDS.GetPieceSize(), embed_dim=160, hidden_dim=320, num_heads=4,
    head_dim=32, num_kv_heads=2, rope_theta=10_000, norm_eps=1e-5,
)  # fmt: skip
SETTINGS = {
    "optax.adamw, f32": (optax.adamw, jnp.float32, contextlib.nullcontext),
    "flash_adamw, bf16": (lowmem.flash_adamw, jnp.bfloat16, substitute),
}
SIZES = {"optax.adamw, f32": (4, 4, 8, 12), "flash_adamw, bf16": (2, 2, 3.4, 5.4)}


def models(dtype):
    """The actor and the reference, which starts as a copy of it."""

    @nnx.jit
    def create():
        model = llama.Llama3(CONFIG, rngs=nnx.Rngs(0))
        state = jax.tree.map(lambda x: x.astype(dtype), nnx.state(model, nnx.Param))
        specs = nnx.get_partition_spec(state)
        nnx.update(model, jax.lax.with_sharding_constraint(state, specs))
        return model

    return create(), create()


def bytes_per_parameter(actor, reference, optimizer):
    """Of each of the three, on all devices."""
    size = sum(x.size for x in jax.tree.leaves(nnx.state(actor, nnx.Param)))
    parts = nnx.state(actor, nnx.Param), nnx.state(reference, nnx.Param), nnx.state(optimizer)
    return [sum(x.nbytes for x in jax.tree.leaves(part)) / size for part in parts]


def pairs():
    """Prompts, chosen responses of even tokens and rejected ones of odd tokens."""
    rng = np.random.default_rng(0)
    draw = lambda: rng.integers(2, CONFIG.vocab_size // 2, (8, 8)) * 2  # noqa: E731
    ones = np.ones((8, 8), np.int32)
    return TrainingInput(
        prompt_ids=draw(), prompt_mask=ones, chosen_ids=draw(), chosen_mask=ones,
        rejected_ids=draw() - 1, rejected_mask=ones,
    )  # fmt: skip


def dpo(make, dtype, substitute, steps=10):
    """Return the bytes, and the losses; that of a policy like the reference is log 2."""
    model, ref_model = models(dtype)
    before = jax.tree.map(jnp.copy, nnx.state(ref_model))
    tx, losses = make(1e-3), []
    config = DPOTrainingConfig(eval_every_n_steps=1000, max_steps=steps, beta=0.1)
    with substitute():
        trainer = DPOTrainer(model, ref_model, tx, config)
    trainer._log_metrics = lambda loss, *_, **__: losses.append(float(loss))
    trainer.train([pairs()] * steps, None)
    sizes = bytes_per_parameter(model, ref_model, trainer.optimizer)
    trainer.close()
    common.assert_same_bits(before, nnx.state(ref_model))
    return sizes, losses


def reward(completions, **_):
    """The share of one word among the words of a completion."""
    return [np.mean([word == "Tunix" for word in text.split()]) for text in completions]


def grpo(make, dtype, substitute, steps=12):
    """Return the bytes, and the mean rewards of the micro-batches."""
    actor, reference = models(dtype)
    before = jax.tree.map(jnp.copy, nnx.state(reference))
    tx, rewards = make(3e-3), []
    config = ClusterConfig(
        role_to_mesh={role: MESH for role in (Role.ACTOR, Role.REFERENCE, Role.ROLLOUT)},
        rollout_engine="vanilla",
        training_config=RLTrainingConfig(
            actor_optimizer=tx,
            eval_every_n_steps=1000,
            max_steps=steps,
            mini_batch_size=2,
            train_micro_batch_size=1,
        ),
        rollout_config=RolloutConfig(
            max_tokens_to_generate=8, max_prompt_length=8, kv_cache_size=16
        ),
    )
    with substitute():  # the cluster makes the trainer
        cluster = RLCluster(
            actor=actor, reference=reference, tokenizer=WORDS, cluster_config=config
        )

    def measured(prompts, completions, **_):
        rewards.append(np.mean(reward(completions)))
        return reward(completions)

    learner = GRPOLearner(cluster, GRPOConfig(num_generations=8, beta=0.01), measured)
    learner.train([{"prompts": ["hello world", "My name"]}] * steps)
    common.assert_same_bits(before, nnx.state(reference))
    assert not learner.should_sync_weights  # the sampler has the actor's arrays, no copy
    return bytes_per_parameter(actor, reference, cluster.actor_trainer.optimizer), rewards


def main():
    for name, settings in SETTINGS.items():
        with jax.set_mesh(MESH):
            (sizes, losses), (accumulating, rewards) = dpo(*settings), grpo(*settings)
        np.testing.assert_allclose([*sizes, accumulating[-1]], SIZES[name], atol=0.05)
        assert losses[-1] < 0.5 * losses[0], losses
        assert np.mean(rewards[-4:]) > 5 * np.mean(rewards[:4]), rewards
        print(f"tunix, {name}: DPO's loss {losses[0]:.3f} to {losses[-1]:.3f}, ", end="")
        print(f"GRPO's reward {np.mean(rewards[:4]):.2f} to {np.mean(rewards[-4:]):.2f}")


if __name__ == "__main__":
    main()
