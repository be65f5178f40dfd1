"""REINFORCE on a contextual bandit: a policy learns which of eight arms a context rewards."""

import jax
import jax.numpy as jnp

import optax_lowmem as lowmem

ARMS = 8


def logits_of(params, contexts):
    hidden = jax.nn.relu(contexts @ params["w1"].astype(contexts.dtype))
    return hidden @ params["w2"].astype(contexts.dtype)


def main(steps: int = 120) -> tuple[float, float]:
    keys = jax.random.split(jax.random.key(0), 3)
    best_arm = jax.random.normal(keys[0], (32, ARMS))  # the arm with the largest score is rewarded
    params_f32 = {
        "w1": jax.random.normal(keys[1], (32, 256)) / 6,
        "w2": jnp.zeros((256, ARMS)),
    }
    tx = lowmem.flash_adamw(3e-3)
    params, state = lowmem.init(tx, params_f32)

    @jax.jit
    def train_step(params, state, key):
        context_key, arm_key = jax.random.split(key)
        contexts = jax.random.normal(context_key, (512, 32))
        arms = jax.random.categorical(arm_key, logits_of(params, contexts))
        rewards = (arms == jnp.argmax(contexts @ best_arm, axis=-1)).astype(jnp.float32)

        def loss_fn(params):
            log_p = jax.nn.log_softmax(logits_of(params, contexts))[jnp.arange(512), arms]
            return -jnp.mean(log_p * (rewards - rewards.mean()))

        params, state = lowmem.step(tx, jax.grad(loss_fn)(params), state, params)
        return params, state, rewards.mean()

    rewards = []
    for i in range(steps):
        params, state, reward = train_step(params, state, jax.random.fold_in(keys[2], i))
        rewards.append(float(reward))
    return -rewards[0], -rewards[-1]


if __name__ == "__main__":
    first, last = main()
    print(f"share of rewarded choices: {-first:.2f} at the first step, {-last:.2f} at the last")
