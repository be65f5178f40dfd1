"""A Flax Linen dense layer with sampled weights (GaussWS)."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from optax_lowmem._src.layers.noise.bitwidth import bitwidth
from optax_lowmem._src.layers.noise.kernels import block_shape
from optax_lowmem._src.layers.noise.sampling import sample


class GaussWSDense(nn.Dense):
    r"""`nn.Dense` with noise of a learnt bitwidth on its kernel: x \hat w + bias (GaussWS).

    Besides kernel and bias it has the parameter `bits`: b_i of each 32 x 32 block, f32, initially
    1. Its gradient is equation 3; weight decay on it pulls b_t to its target (equation 9).

    Noise uses the random stream `gaussws`: `apply(..., rngs={"gaussws": key})`. Equal keys give
    equal noise, so use one key for all micro-batches of a step. Without the stream, as in
    evaluation and `init`, there is no noise. Under `nn.scan` add the stream to `split_rngs`.

    Attributes:
      bits_init: initial b_t.
      bits_target: target of b_t.
      noise: as in `gaussws.sample`.
      compute: format that the sampled kernel is rounded to, as in `gaussws.sample`; None: the
        layer's `dtype`.

    Example:
      >>> import jax.numpy as jnp
      >>> from optax_lowmem import layers
      >>> layer = layers.GaussWSDense(3)
      >>> clean, variables = layer.init_with_output(jax.random.key(0), jnp.ones((2, 64)))
      >>> variables["params"]["bits"].shape
      (2, 1)
      >>> noisy = layer.apply(variables, jnp.ones((2, 64)), rngs={"gaussws": jax.random.key(1)})
      >>> bool((noisy != clean).any())
      True
    """

    bits_init: float = 6.0
    bits_target: float = 4.0
    noise: str = "gaussws"
    compute: str | None = None

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Return [..., features] for `inputs` [..., in]."""
        size = (jnp.shape(inputs)[-1], self.features)
        kernel = self.param("kernel", self.kernel_init, size, self.param_dtype)
        ones = nn.initializers.ones
        b = self.param("bits", ones, block_shape(size), jnp.float32)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype)
        if self.has_rng("gaussws"):
            dtype = self.dtype or jnp.promote_types(inputs.dtype, kernel.dtype)
            kernel = sample(
                kernel,
                bitwidth(b, self.bits_init, self.bits_target),
                self.make_rng("gaussws"),
                noise=self.noise,
                compute=self.compute or jnp.dtype(dtype).name,
            )
        x, w, bias = self.promote_dtype(inputs, kernel, bias, dtype=self.dtype)
        assert x is not None and w is not None
        product = self.dot_general_cls() if self.dot_general_cls is not None else self.dot_general
        dims = (((x.ndim - 1,), (0,)), ((), ()))
        y = (product or lax.dot_general)(x, w, dims, precision=self.precision)
        return y if bias is None else y + jnp.reshape(bias, (1,) * (y.ndim - 1) + (-1,))
