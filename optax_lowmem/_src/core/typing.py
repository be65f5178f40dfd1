"""Types that JAX and optax have no name for."""

from typing import TypeAlias, TypeVar

import jax

T = TypeVar("T")
Tree = TypeVar("Tree")  # a pytree that comes back in its structure
Shaped: TypeAlias = jax.Array | jax.ShapeDtypeStruct  # what has a shape and a dtype
