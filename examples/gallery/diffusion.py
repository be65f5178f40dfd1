"""Learn to remove noise from points on a circle, as a diffusion model does."""

import jax
import jax.numpy as jnp

import optax_lowmem as lowmem

LEVELS = 50
KEPT = jnp.cumprod(1 - jnp.linspace(1e-3, 0.2, LEVELS))  # share of the variance that is signal


def predict(params, points, level):
    features = jnp.concatenate([points, jax.nn.one_hot(level, LEVELS)], axis=-1)
    hidden = jax.nn.silu(features @ params["w1"].astype(features.dtype))
    return jax.nn.silu(hidden @ params["w2"].astype(hidden.dtype)) @ params["w3"].astype(
        hidden.dtype
    )


def loss_fn(params, key):
    angle_key, level_key, noise_key = jax.random.split(key, 3)
    angle = jax.random.uniform(angle_key, (512,), maxval=2 * jnp.pi)
    points = jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=-1)
    level = jax.random.randint(level_key, (512,), 0, LEVELS)
    noise, kept = jax.random.normal(noise_key, points.shape), KEPT[level][:, None]
    noisy = jnp.sqrt(kept) * points + jnp.sqrt(1 - kept) * noise
    return jnp.mean((predict(params, noisy, level) - noise) ** 2)


def main(steps: int = 150) -> tuple[float, float]:
    keys = jax.random.split(jax.random.key(0), 4)
    params_f32 = {
        "w1": jax.random.normal(keys[0], (2 + LEVELS, 128)) / 4,
        "w2": jax.random.normal(keys[1], (128, 128)) / 11,
        "w3": jnp.zeros((128, 2)),
    }
    tx = lowmem.track_master_ema(lowmem.flash_adamw(3e-3), decay=0.95)
    params, state = lowmem.init(tx, params_f32)

    @jax.jit
    def train_step(params, state, key):
        loss, grads = jax.value_and_grad(loss_fn)(params, key)
        return *lowmem.step(tx, grads, state, params), loss

    for i in range(steps):
        params, state, _ = train_step(params, state, jax.random.fold_in(keys[3], i))
    test_key = jax.random.key(1)
    return float(loss_fn(params_f32, test_key)), float(loss_fn(lowmem.ema_params(state), test_key))


if __name__ == "__main__":
    print("loss before training, and of the averaged weights:", *main())
