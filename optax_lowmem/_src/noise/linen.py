"""A dense layer of Flax Linen whose weights are sampled (GaussWS)."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from optax_lowmem._src.noise.bitwidth import bitwidth
from optax_lowmem._src.noise.kernels import block_shape
from optax_lowmem._src.noise.sampling import sample


class GaussWSDense(nn.Dense):
    r"""`nn.Dense` with noise of a learnt bitwidth on its kernel: x \hat w + bias (GaussWS).

    Beside kernel and bias it has the parameter `bits`, b_i of each block of 32 x 32, f32, from 1,
    whose gradient is that of equation 3; weight decay on it guides b_t to its target (equation 9).

    Noise comes from the random stream `gaussws`: `apply(..., rngs={"gaussws": key})`, where the
    same key is the same noise, so give micro-batches of a step one key. Without the stream the
    weights have none: evaluation, and `init`. Under `nn.scan` name the stream in `split_rngs`.

    Attributes:
      bits_init: b_t at first.
      bits_target: what b_t is guided to.
      noise: as of `gaussws.sample`.
      compute: a format that the sampled kernel is rounded to, as of `gaussws.sample`; None: the
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
        """[..., features] of `inputs` [..., in]."""
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
