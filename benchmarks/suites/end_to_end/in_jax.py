"""Products of other JAX libraries, for the matrices of the example's layers.

Each is a `dot_general`, by the name that `--linear` takes once `register` has added it. Qwix's are
those that its provider of quantized training makes of the rules here: absmax scales in each product
(`-tensor`: one scale for a tensor, otherwise one for each row or channel), gradients in e5m2 or
int8. Flax's is `fp8_scaled_dot_general` with its scales and histories as they are in the first
step: it has the speed of Flax's `Fp8DirectDotGeneralOp`, less the update of its scales, and no
meaningful loss.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from _llama.config import LINEARS

QWIX = {  # name -> dtypes of weights and activations, of gradients, whether a scale is a tensor's
    "qwix-fp8": (jnp.float8_e4m3fn, jnp.float8_e5m2, False),
    "qwix-fp8-tensor": (jnp.float8_e4m3fn, jnp.float8_e5m2, True),
    "qwix-int8": (jnp.int8, jnp.int8, False),
    "qwix-int8-tensor": (jnp.int8, jnp.int8, True),
}
FLAX = "flax-fp8"
NAMES = (*QWIX, FLAX)
PACKAGES = ("flax", "qwix")
_HISTORY = 1024  # Flax's default


def register(name: str) -> None:
    """Let examples/train_llama.py take `--linear NAME`."""
    LINEARS[name] = _in_flax() if name == FLAX else _in_qwix(*QWIX[name])


def _in_qwix(forward: Any, backward: Any, of_tensor: bool) -> Callable[..., jax.Array]:
    from qwix._src.core import dot_general_qt

    config = dot_general_qt.DotGeneralQtConfig(
        lhs_qtype=forward, rhs_qtype=forward, dlhs_grad_qtype=backward, drhs_grad_qtype=backward,
        lhs_disable_channelwise_axes=of_tensor, rhs_disable_channelwise_axes=of_tensor,
        dlhs_grad_disable_channelwise_axes=of_tensor, drhs_grad_disable_channelwise_axes=of_tensor,
    )  # fmt: skip

    def dot_general(x: jax.Array, w: jax.Array, dimensions: Any, **_: Any) -> jax.Array:
        return dot_general_qt.dot_general_qt(x, w, dimensions, config)

    return dot_general


def _in_flax() -> Callable[..., jax.Array]:
    from flax.linen import fp8_ops

    one, none = jnp.ones(1), jnp.zeros(_HISTORY)
    scales = dict.fromkeys(("lhs_scale", "rhs_scale", "grad_scale"), one)
    histories = dict.fromkeys(("lhs_amax_history", "rhs_amax_history", "grad_amax_history"), none)
    product = functools.partial(fp8_ops.fp8_scaled_dot_general, **scales, **histories)

    def dot_general(x: jax.Array, w: jax.Array, dimensions: Any, **_: Any) -> jax.Array:
        result: jax.Array = product(
            x, w, dimensions, preferred_element_type=x.dtype, quantize_compute_type=w.dtype
        )
        return result

    return dot_general
