"""A Flax NNX linear layer with sampled weights (GaussWS)."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from optax_lowmem._src.arrays import random
from optax_lowmem._src.layers.noise.bitwidth import bitwidth
from optax_lowmem._src.layers.noise.kernels import block_shape
from optax_lowmem._src.layers.noise.sampling import sample


class NoiseSeed(nnx.Variable[jax.Array]):
    """Seed of a layer's noise, uint32."""


class NoiseStep(nnx.Variable[jax.Array]):
    """Number of times that a layer's noise was renewed, uint32."""


class GaussWSLinear(nnx.Linear):
    r"""`nnx.Linear` with noise of a learnt bitwidth on its kernel: x \hat w + bias (GaussWS).

    Besides kernel and bias it has the parameter `bits`: b_i of each 32 x 32 block, f32, initially
    1. Its gradient is equation 3; weight decay on it pulls b_t to its target (equation 9).

    The noise stays the same, in all micro-batches of a step, until `renew_noise(model)`. There is
    none if `deterministic`, which `model.eval()` and `model.train()` set.

    Args:
      in_features: as in `nnx.Linear`.
      out_features: likewise.
      rngs: likewise.
      bits_init: initial b_t.
      bits_target: target of b_t.
      noise: as in `gaussws.sample`.
      compute: format that the sampled kernel is rounded to, as in `gaussws.sample`; None: the
        layer's `dtype`.
      seed: seed of the noise, combined with `path`; None: drawn from `rngs` (in `convert`: 0).
      path: path of the kernel in its model, as `gaussws_noise` would see it; `convert` sets it.
      deterministic: whether to omit the noise.
      **more: other arguments of `nnx.Linear`.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from optax_lowmem import layers
      >>> layer = layers.GaussWSLinear(64, 3, rngs=nnx.Rngs(0))
      >>> first, again = layer(jnp.ones((2, 64))), layer(jnp.ones((2, 64)))
      >>> layers.renew_noise(layer)
      >>> bool((first == again).all()), bool((layer(jnp.ones((2, 64))) == first).all())
      (True, False)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        rngs: nnx.Rngs,
        bits_init: float = 6.0,
        bits_target: float = 4.0,
        noise: str = "gaussws",
        compute: str | None = None,
        seed: int | None = None,
        path: str = "",
        deterministic: bool = False,
        **more: Any,
    ):
        super().__init__(in_features, out_features, rngs=rngs, **more)
        self.bits_init, self.bits_target = bits_init, bits_target
        self.noise, self.compute = noise, compute
        self.seed, self.path, self.deterministic = seed, path, deterministic
        drawn = jax.random.bits(rngs.params(), (), jnp.uint32) if seed is None else seed
        self._init_noise_state(jnp.uint32(drawn))

    def _init_noise_state(self, seed: jax.Array) -> None:
        shape = self.kernel.shape
        self.bits = nnx.Param(jnp.ones(block_shape(shape), jnp.float32))
        self.noise_seed = NoiseSeed(seed)
        self.noise_step = NoiseStep(jnp.zeros_like(seed))

    def adopt(self, path: str) -> None:
        """Add the variables that a converted layer lacks: bitwidths, seed and step."""
        self.path = f"{path}/kernel"
        stack = self.kernel.shape[:-2]  # scanned layers, each with different noise
        seed = jnp.uint32(self.seed or 0)
        if stack:
            layers = jnp.arange(math.prod(stack), dtype=jnp.uint32).reshape(stack)
            seed = random.mix(seed + layers)
        self._init_noise_state(seed)

    # variables that the layer replaced by `convert` need not have
    added = ("bits", "noise_seed", "noise_step")

    def sampled(self, dtype: DTypeLike | None = None) -> jax.Array:
        """Return the kernel with its current noise; `dtype` defaults to the kernel's."""
        kernel = self.kernel[...]
        key = random.leaf_key(self.noise_seed[...], self.noise_step[...], self.path)
        return sample(
            kernel,
            bitwidth(self.bits[...], self.bits_init, self.bits_target),
            key,
            noise=self.noise,
            compute=self.compute or jnp.dtype(dtype or kernel.dtype).name,
        )

    def __call__(
        self, inputs: jax.Array, out_sharding: jax.sharding.Sharding | None = None
    ) -> jax.Array:
        """Return [..., out_features] for `inputs` [..., in_features]."""
        kernel = self.kernel[...]
        if not self.deterministic:
            dtype = self.dtype or jnp.promote_types(inputs.dtype, kernel.dtype)
            kernel = self.sampled(dtype)
        bias = None if self.bias is None else self.bias[...]
        inputs, kernel, bias = self.promote_dtype((inputs, kernel, bias), dtype=self.dtype)
        more: dict[str, object] = {"out_sharding": out_sharding}
        if self.preferred_element_type is not None:
            more["preferred_element_type"] = self.preferred_element_type
        dims = (((inputs.ndim - 1,), (0,)), ((), ()))
        y = self.dot_general(inputs, kernel, dims, precision=self.precision, **more)
        return y if bias is None else y + jnp.reshape(bias, (1,) * (y.ndim - 1) + (-1,))


def renew_noise(model: nnx.Module) -> None:
    """Draw new noise in all `GaussWSLinear` layers of a model; call it after each optimizer step.

    Args:
      model: an NNX model, changed in place; also works inside `nnx.jit`.

    Raises:
      ValueError: for a model without a `GaussWSLinear`.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from optax_lowmem import layers
      >>> layer = layers.GaussWSLinear(64, 3, rngs=nnx.Rngs(0))
      >>> before = layer(jnp.ones((2, 64)))
      >>> layers.renew_noise(layer)
      >>> bool((layer(jnp.ones((2, 64))) != before).any())
      True
    """
    steps = nnx.state(model, NoiseStep)
    if not jax.tree.leaves(steps):
        raise ValueError("the model has no GaussWSLinear: `layers.convert` adds them")
    nnx.update(model, jax.tree.map(lambda step: step + jnp.ones_like(step), steps))
