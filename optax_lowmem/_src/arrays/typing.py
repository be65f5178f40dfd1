"""Types that JAX and optax have no name for."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar

import jax
from jax.typing import ArrayLike

PyTree: TypeAlias = Any  # arrays in containers, or one array; JAX has no type for it
Structure: TypeAlias = Any  # a jax.tree_util.PyTreeDef, which mypy cannot read
KeyPath: TypeAlias = tuple[Any, ...]  # jax.tree_util.KeyPath, without its type variable
Json: TypeAlias = Mapping[str, Any]  # what a JSON file holds
T = TypeVar("T")
Tree = TypeVar("Tree")  # a pytree, returned with the same structure
Shaped: TypeAlias = jax.Array | jax.ShapeDtypeStruct  # has a shape and a dtype
Arrays: TypeAlias = Mapping[str, jax.Array]  # by name, such as slots and hyperparameters
Scalar: TypeAlias = float | jax.Array
ScalarOrSchedule: TypeAlias = Scalar | Callable[[jax.Array], ArrayLike]
