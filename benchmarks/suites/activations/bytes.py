"""Bytes that a Llama's layer keeps for its backward pass, from shapes alone (COAT, Table 2)."""

from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from benchmarks.suites.activations import layers as activation_layers
from benchmarks.suites.activations.layers import Shape
from optax_lowmem import memory

# columns of Table 2, and what else there is: the sums that go past the layer
COLUMNS = ("RMSNorm", "Act Func", "RoPE", "FlashAttn", "Linear", "Residual")
# a part of the names that `jax.named_scope`s give an operation -> its column
_OF = {"norm": 0, "activation": 1, "rotary": 2, "attention": 3, "linear": 4}


def column(operation: str) -> str:
    """Return the column of an operation: that of the last known part of its name."""
    parts = [part for part in operation.split("/") if part in _OF]
    return COLUMNS[_OF[parts[-1]] if parts else -1]


def by_column(report: memory.ActivationReport) -> dict[str, float]:
    """U of what the operations of each column made."""
    found = dict.fromkeys(COLUMNS, 0.0)
    for operation, size in report.by_operation.items():
        found[column(operation)] += size / report.unit
    return found


@jax.custom_vjp
def flash_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Stands for cuDNN's where nothing is computed: [batch, length, heads, head] of the same."""
    return q + jnp.zeros_like(k[..., :1, :1]) + jnp.zeros_like(v[..., :1, :1])


def _forward(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
    y = flash_attention(q, k, v)
    return y, (q, k, v, y, jnp.sum(q, -1, dtype=jnp.float32))  # a row's sum of exponentials


def _backward(kept: Any, g: jax.Array) -> tuple[jax.Array, ...]:
    q, k, v, y, sums = kept
    factor = y * sums.astype(y.dtype)[..., None]
    return g * factor, jnp.zeros_like(k), jnp.zeros_like(v)


flash_attention.defvjp(_forward, _backward)


def kept(shape: Shape, name: str, attention: str) -> memory.ActivationReport:
    """The report of a layer by its name, in U; nothing is computed.

    The attention `cudnn`, which cannot be traced without a GPU, is one that keeps as much.
    """
    own = jax.nn.dot_product_attention
    if attention == "cudnn":
        own = lambda q, k, v, **more: flash_attention(q, k, v)  # noqa: E731
    with mock.patch.object(jax.nn, "dot_product_attention", own):
        layer, params = activation_layers.make_abstract(name, shape, attention)
        x = jax.ShapeDtypeStruct((shape.batch, shape.length, shape.width), jnp.bfloat16)
        return memory.activation_report(layer, params, x, weights=0, unit=shape.unit)
