"""tunix's `PeftTrainer` on a small Llama: full training, accumulation, FSDP, resume; DPO, GRPO."""

import common  # isort: skip

import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import on_tunix_rl
import optax
from flax import nnx
from tunix.models.llama3 import model as llama
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig, TrainingInput

import optax_lowmem as lowmem
from optax_lowmem.flax import substitute

MESH = jax.sharding.Mesh(np.array(jax.devices()).reshape(common.DEVICES, 1), ("fsdp", "tp"))
CONFIG = llama.ModelConfig(
    num_layers=1, vocab_size=256, embed_dim=160, hidden_dim=320, num_heads=4, head_dim=32,
    num_kv_heads=2, rope_theta=10_000, norm_eps=1e-5,
)  # fmt: skip
TOKENS = common.tokens(8, 32, CONFIG.vocab_size)


def model_of(dtype):
    @nnx.jit
    def create():
        model = llama.Llama3(CONFIG, rngs=nnx.Rngs(0))
        state = jax.tree.map(lambda x: x.astype(dtype), nnx.state(model, nnx.Param))
        specs = nnx.get_partition_spec(state)
        nnx.update(model, jax.lax.with_sharding_constraint(state, specs))
        return model

    with MESH:
        return create()


def inputs(x):
    batch, length = x.input_tokens.shape
    mask = jnp.tril(jnp.ones((length, length), bool))
    return dict(
        input_tokens=x.input_tokens, input_mask=x.input_mask,
        positions=jnp.broadcast_to(jnp.arange(length), (batch, length)),
        attention_mask=jnp.broadcast_to(mask, (batch, length, length)),
    )  # fmt: skip


def trained(tx, dtype, steps, accumulate=None, folder=None):
    model, losses = model_of(dtype), []
    config = TrainingConfig(
        eval_every_n_steps=1000, max_steps=steps, max_inflight_computations=1,
        gradient_accumulation_steps=accumulate, checkpoint_root_directory=folder,
    )  # fmt: skip
    with substitute():
        trainer = PeftTrainer(model, tx, config)
    trainer = trainer.with_gen_model_input_fn(inputs)
    post = lambda loss, *_, **__: losses.append(float(loss))  # noqa: E731
    trainer._log_metrics = post
    batch = TrainingInput(input_tokens=TOKENS, input_mask=np.ones_like(TOKENS))
    with MESH:
        trainer.train([batch] * (steps * (accumulate or 1)), None)
    trainer.close()
    return losses, nnx.state(model, nnx.Param), trainer.optimizer


def train(impl):
    make = optax.adamw if impl == common.PLAIN else lowmem.flash_adamw
    losses, params, optimizer = trained(make(common.RATE), common.DTYPES[impl], common.STEPS)
    arrays = params, nnx.state(optimizer)
    return losses, arrays, sum(x.size for x in jax.tree.leaves(params))


def resumes():
    """With accumulation, through tunix's own checkpoints."""
    options = lowmem.flash_adamw(common.RATE), jnp.bfloat16
    _, whole, optimizer = trained(*options, 4, accumulate=2)
    assert optimizer.opt_state.accumulated["embedder"]["input_embedding"].dtype == jnp.bfloat16
    with tempfile.TemporaryDirectory() as folder:
        trained(*options, 2, accumulate=2, folder=folder)
        _, resumed, _ = trained(*options, 4, accumulate=2, folder=folder)
    common.assert_same_bits(whole, resumed)


if __name__ == "__main__":
    common.compare("google-tunix", train)
    resumes()
    on_tunix_rl.main()
