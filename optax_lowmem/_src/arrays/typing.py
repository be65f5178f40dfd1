"""Types that JAX and optax have no name for."""

from collections.abc import Callable, Mapping
from typing import TypeAlias, TypeVar

import jax
from jax.typing import ArrayLike

T = TypeVar("T")
Tree = TypeVar("Tree")  # a pytree, returned with the same structure
Shaped: TypeAlias = jax.Array | jax.ShapeDtypeStruct  # has a shape and a dtype
Arrays: TypeAlias = Mapping[str, jax.Array]  # by name, such as slots and hyperparameters
Scalar: TypeAlias = float | jax.Array
ScalarOrSchedule: TypeAlias = Scalar | Callable[[jax.Array], ArrayLike]
