"""SwitchBack layers for Flax Linen."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.dtypes import promote_dtype

from optax_lowmem._src.layers.switchback.dot_general import switchback_dot_general


class SwitchBackDense(nn.Dense):
    """`nn.Dense` with the same arguments, parameters and names, whose products run in 8 bits.

    Beside the attributes of `nn.Dense` it has the arguments of `switchback_dot_general`, which has
    the mathematics and its limits.

    Example:
      >>> import jax.numpy as jnp
      >>> from optax_lowmem import layers
      >>> layer = layers.SwitchBackDense(3, variant="switchback_m")
      >>> y, variables = layer.init_with_output(jax.random.key(0), jnp.ones((2, 8)))
      >>> y.shape, variables["params"]["kernel"].shape
      ((2, 3), (8, 3))
    """

    variant: str = "switchback"
    format: str = "int8"
    scaling: str = "format"
    implementation: str = "quantized"

    def __post_init__(self) -> None:
        if self.dot_general is None and self.dot_general_cls is None:
            self.dot_general = switchback_dot_general(
                self.variant, self.format, scaling=self.scaling, implementation=self.implementation
            )
        super().__post_init__()

    def clone(self, **updates: Any) -> Any:
        """Clone the module as `nn.Module.clone`; changes of variant or its options take effect."""
        if {"variant", "format", "scaling", "implementation"} & updates.keys():
            updates = {"dot_general": None, **updates}
        return super().clone(**updates)


class LayerScale(nn.Module):
    """Multiply a block's output by a learned vector, initially 0 (SwitchBack, eq. 3).

    x + LayerScale()(block(x)) is initially the identity: features stay small at all depths, which
    makes training in tensor-wise float8 stable.

    Attributes:
      init_value: initial value of the vector, `scale`.
      dtype: dtype of the product; None: that of the input.
      param_dtype: dtype of the vector.

    Example:
      >>> import jax.numpy as jnp
      >>> from optax_lowmem.layers import linen
      >>> print(linen.LayerScale().init_with_output(jax.random.key(0), jnp.ones(3))[0])
      [0. 0. 0.]
    """

    init_value: float = 0.0
    dtype: jnp.dtype | None = None
    param_dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Multiply `x` [..., features] by `scale` [features]."""
        constant = nn.initializers.constant(self.init_value)
        scale = self.param("scale", constant, x.shape[-1:], self.param_dtype)
        x, scale = promote_dtype(x, scale, dtype=self.dtype or x.dtype)
        return x * scale.reshape((1,) * (x.ndim - 1) + (-1,))
