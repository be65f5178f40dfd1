"""Storage of an FP8 flow: its options, the values passed between its layers, and their codes."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_lowmem._src.core.typing import T
from optax_lowmem._src.fp8_flow.kernels import quantized, quantized_for_products
from optax_lowmem._src.quantized_matmul import (
    E4M3,
    FORMATS,
    Format,
    Quantized,
    absmax_of,
)

FORWARD = E4M3
BF16 = "bf16"
FP8 = "fp8"
_PRODUCTS = ("e4m3", "e5m2", BF16)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Storage of activations in 8 bits, and formats of the products of the backward pass.

    Attributes:
      group_size: neighbours on the last axis that share a scale, where inputs of norms and
        activation functions are kept.
      exact: whether norms and activation functions compute from what they are given; False is the
        paper's flow, which computes from the codes, and so adds their error to the forward pass.
      input_gradient: format of the gradient G of Y in dX = G W^T: `e4m3`, `e5m2`, or `bf16`, a
        product in the inputs' own precision.
      weight_gradient: likewise in dW = X^T G.
      storage: `fp8`, or `bf16`: nothing is quantized. Norms and activation functions keep their
        inputs in the inputs' own precision and nothing else, linear layers behind them keep
        nothing, and all products run in that precision; the forward pass has the bits of ordinary
        layers. The other fields then have no meaning.

    Raises:
      ValueError: for another value, or `storage="bf16"` with another field changed.
    """

    group_size: int = 16
    exact: bool = True
    input_gradient: str = "e4m3"
    weight_gradient: str = "e4m3"
    storage: str = FP8

    def __post_init__(self) -> None:
        if self.storage not in (FP8, BF16):
            raise ValueError(f"storage must be {FP8} or {BF16}, got {self.storage!r}")
        if self.storage == BF16:
            for field in dataclasses.fields(self)[:-1]:
                if getattr(self, field.name) != field.default:
                    raise ValueError(
                        f"{field.name}={getattr(self, field.name)!r} with storage='bf16', which "
                        "quantizes nothing: leave it out"
                    )
        if self.group_size < 1:
            raise ValueError(f"group_size must be at least 1, got {self.group_size}")
        for name in ("input_gradient", "weight_gradient"):
            if getattr(self, name) not in _PRODUCTS:
                raise ValueError(
                    f"{name} must be one of {', '.join(_PRODUCTS)}, got {getattr(self, name)!r}"
                )

    @classmethod
    def paper(cls, **changes: object) -> "Recipe":
        """COAT's: everything from codes, gradients in E5M2 as its kernels have them."""
        own: dict[str, Any] = dict(exact=False, input_gradient="e5m2", weight_gradient="e5m2")
        return cls(**own | changes)

    @property
    def quantizes(self) -> bool:
        """Return whether anything is stored or multiplied in 8 bits."""
        return self.storage == FP8


DEFAULT = Recipe()


def format_of(name: str) -> Format | None:
    """The format of a gradient; None for a product that is not quantized."""
    return None if name == BF16 else FORMATS[name]


@dataclasses.dataclass(frozen=True)
class ArrayFunction:
    """A function of arrays, whose result is given the dtype of the first one.

    Attributes:
      function: of `static`, then arrays.
      static: hashable.
      wide: whether the arrays are f32 to it.
    """

    function: Callable[..., jax.Array]
    static: Any
    wide: bool = True

    def __call__(self, *given: jax.Array) -> jax.Array:
        """The result of arrays of any floating dtype."""
        # not by `numerics.widen`, which has no derivative
        arrays = (x.astype(jnp.float32) for x in given) if self.wide else given
        return self.function(self.static, *arrays).astype(given[0].dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """Recomputation of an activation from arrays that are kept.

    Attributes:
      formula: the function of `given` that returns the activation.
      given: arrays that are kept for the gradient anyway.
    """

    formula: ArrayFunction = dataclasses.field(metadata={"static": True})
    given: tuple[jax.Array, ...]

    def again(self) -> jax.Array:
        """The activation."""
        return self.formula(*self.given)


@jax.tree_util.register_dataclass  # no tuple: Flax's Sequential takes those apart
@dataclasses.dataclass(frozen=True, eq=False)
class Coded:
    """An activation on its way to matrix products: quantized once, for all of them.

    Attributes:
      value: in 16 bits or f32; what gradients belong to. Products of codes do not read it, and
        where nothing else does, XLA never makes it.
      quantized: codes of its shape and one scale; None with `Recipe(storage="bf16")`.
      source: with that recipe, what the products' backward pass computes the value from.
      transposed: the codes as [k, tokens], where a kernel sums gradients of weights over tokens;
        the backward pass is then given these alone.
    """

    value: jax.Array
    quantized: Quantized | None
    source: Source | None = None
    transposed: jax.Array | None = None


def value_of(x: jax.Array | Coded) -> jax.Array:
    """The array itself."""
    return x.value if isinstance(x, Coded) else x


# ---- activations quantized, and what rules of differentiation here have in common ----------------


def kept(*trees: Any) -> Any:
    """The same arrays, each stored as it is once one of them is.

    Else XLA would compute codes that only the backward pass reads there, and keep what they are of.
    """
    return lax.optimization_barrier(trees)


def coded(
    recipe: Recipe,
    function: ArrayFunction,
    given: tuple[jax.Array, ...],
    absmax: jax.Array,
    stored: T,
    keep: bool,
    in_kernel: bool = True,
) -> tuple[Coded, T]:
    """An activation quantized for matrix products, as it is computed.

    Args:
      recipe: of the products too.
      function: of `given`, elementwise.
      given: arrays that broadcast to the first one.
      absmax: of the result.
      stored: what the backward pass needs.
      keep: whether there is one.
      in_kernel: whether kernels can compute the function.

    Returns:
      The activation, and what is stored.
    """
    over_tokens, now = format_of(recipe.weight_gradient) is not None, keep and in_kernel
    codes, transposed = quantized_for_products(function, given, absmax, over_tokens, now)
    if keep:
        codes, transposed, stored = kept(codes, transposed, stored)
    return Coded(function(*given), codes, transposed=transposed), stored


def code(x: jax.Array | Coded) -> Coded:
    """An activation quantized for matrix products, by one scale.

    The gradient goes straight through. One that is quantized stays as it is.
    """
    return x if isinstance(x, Coded) and x.quantized is not None else _code(value_of(x))


@jax.custom_vjp
def _code(x: jax.Array) -> Coded:
    return Coded(x, quantized(x, absmax_of(x, None)))


_code.defvjp(lambda x: (_code(x), None), lambda saved, g: (g.value,))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def recomputed(formula: ArrayFunction, *given: jax.Array) -> Coded:
    """The value of a formula, of which the backward pass is given the arguments alone.

    It computes what it needs from these once more, as linear layers of the value do.
    """
    return _recomputed_forward(formula, *given)[0]


def _recomputed_forward(formula: ArrayFunction, *given: jax.Array) -> tuple[Coded, Any]:
    # else XLA would find that both computations are the same, and keep the first one's results
    again = lax.optimization_barrier(given)
    return Coded(formula(*given), None, Source(formula, again)), again


def _recomputed_backward(formula: ArrayFunction, given: Any, g: Coded) -> tuple[jax.Array, ...]:
    return jax.vjp(formula, *given)[1](g.value)


recomputed.defvjp(_recomputed_forward, _recomputed_backward)
