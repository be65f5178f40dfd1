"""The product of an activation and a frozen matrix in NF4."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from optax_lowmem._src.arrays import nf4, varying
from optax_lowmem._src.arrays.nf4 import NF4Array
from optax_lowmem._src.arrays.sharding import sharding_of


def matmul(x: jax.Array, w: NF4Array, transposed: bool = False) -> jax.Array:
    """Multiply an activation by a frozen matrix in NF4.

    The matrix is decoded into a temporary array of x's dtype, which one product reads. The backward
    pass decodes it again, so nothing but `w` itself is kept between the passes. Neither pass
    decodes before its operand is computed: XLA can neither keep the temporary of one product for
    another, nor move it out of a loop.

    Args:
      x: floating-point [..., k].
      w: a matrix [k, m] in NF4, or if `transposed`, [m, k]. It has no gradient.
      transposed: whether to multiply by the transposed matrix. A kernel of PyTorch,
        [outputs, inputs], is multiplied so.

    Returns:
      x w, or x w^T: [..., m] in x's dtype. Its gradient with respect to x, given that of the result
      g, is g w^T or g w. Both equal the products with `dequantize(w, x.dtype)`.

    Raises:
      ValueError: if w is a stack of matrices, or x and w do not have the same k.
      TypeError: if x is not floating-point, or w is no `NF4Array`.

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> w = lowmem.layers.nf4.quantize(jnp.ones((4, 64)))
      >>> lowmem.layers.nf4.matmul(jnp.ones((2, 64)), w, transposed=True).tolist()
      [[64.0, 64.0, 64.0, 64.0], [64.0, 64.0, 64.0, 64.0]]
    """
    if not isinstance(w, NF4Array):
        raise TypeError(f"w is a {type(w).__name__}, not an NF4Array: call nf4.quantize first")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"x is {x.dtype}; matmul takes floating-point activations")
    if w.ndim != 2:
        raise ValueError(
            f"w is a stack of matrices, {list(w.shape)}: multiply by one of them, which "
            "jax.tree.map(lambda a: a[i], w) returns, or use jax.vmap or jax.lax.scan"
        )
    if not x.ndim or x.shape[-1] != w.shape[transposed]:
        names = "[m, k]; x is [..., k]" if transposed else "[k, m]; x is [..., k]"
        raise ValueError(
            f"x has the shape {list(x.shape)} and w {list(w.shape)}, which is to be {names}"
        )
    return _matmul(transposed, sharding_of(x), *varying.alike(x, w))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _matmul(transposed: bool, of_x: NamedSharding | None, x: jax.Array, w: NF4Array) -> jax.Array:
    return _product(x, w, int(transposed))


def _product(
    x: jax.Array, w: NF4Array, axis: int, sharding: NamedSharding | None = None
) -> jax.Array:
    """Return x times w, summed over x's last axis and this one of w.

    On Explicit axes, the result has this sharding.
    """
    # what is decoded depends on x, and is an array before the product
    absmax, x = lax.optimization_barrier((nf4.decoded_absmax(w), x))
    matrix = lax.optimization_barrier(nf4.decode(w.codes, absmax, x.dtype))
    axes = (((x.ndim - 1,), (axis,)), ((), ()))
    return lax.dot_general(x, matrix, axes, out_sharding=sharding)


def _forward(
    transposed: bool, of_x: NamedSharding | None, x: jax.Array, w: NF4Array
) -> tuple[jax.Array, NF4Array]:
    return _matmul(transposed, of_x, x, w), w


def _backward(
    transposed: bool, of_x: NamedSharding | None, w: NF4Array, g: jax.Array
) -> tuple[jax.Array, None]:
    return _product(g, w, 1 - transposed, of_x), None


_matmul.defvjp(_forward, _backward)
