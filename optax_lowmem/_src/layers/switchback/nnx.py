"""SwitchBack layers for Flax NNX."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from optax_lowmem._src.layers.switchback.dot_general import switchback_dot_general


class SwitchBackLinear(nnx.Linear):
    """`nnx.Linear` with the same arguments, parameters and names, whose products run in 8 bits.

    Beside the arguments of `nnx.Linear` it has those of `switchback_dot_general`, which has the
    mathematics and its limits.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from optax_lowmem import layers
      >>> layer = layers.SwitchBackLinear(8, 3, format="fp8", rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((2, 8))).shape
      (2, 3)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        variant: str = "switchback",
        format: str = "int8",
        scaling: str = "format",
        implementation: str = "quantized",
        **more: Any,
    ):
        how = {"scaling": scaling, "implementation": implementation}
        more.setdefault("dot_general", switchback_dot_general(variant, format, **how))
        super().__init__(in_features, out_features, **more)


class LayerScale(nnx.Module):
    """Multiply a block's output by a learned vector, initially 0 (SwitchBack, eq. 3).

    x + LayerScale(features)(block(x)) is initially the identity: features stay small at all depths,
    which makes training in tensor-wise float8 stable.

    Args:
      features: length of the vector, `scale`.
      init_value: initial value of the vector.
      dtype: dtype of the product; None: that of the input.
      param_dtype: dtype of the vector.

    Example:
      >>> import jax.numpy as jnp
      >>> from optax_lowmem import layers
      >>> print(layers.LayerScale(3)(jnp.ones(3)))
      [0. 0. 0.]
    """

    def __init__(
        self,
        features: int,
        *,
        init_value: float = 0.0,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
    ):
        self.scale = nnx.Param(jnp.full(features, init_value, param_dtype))
        self.dtype = dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        """Multiply `x` [..., features] by `scale` [features]."""
        dtype = self.dtype or x.dtype
        scale = self.scale[...].astype(dtype)
        return x.astype(dtype) * scale.reshape((1,) * (x.ndim - 1) + (-1,))
