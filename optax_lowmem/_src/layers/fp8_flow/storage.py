"""Storage of activations in the FP8 flow: options, and the values passed between its layers."""

import dataclasses
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_lowmem._src.arrays.hyperparameters import check_choice
from optax_lowmem._src.arrays.typing import PyTree, T
from optax_lowmem._src.layers.fp8_flow.kernels import quantized, quantized_for_products
from optax_lowmem._src.layers.quantized_matmul import E4M3, FORMATS, Format, Quantized, absmax_of

FORWARD = E4M3
BF16 = "bf16"
FP8 = "fp8"
_PRODUCTS = ("e4m3", "e5m2", BF16)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Storage of activations in 8 bits, and formats of the products of the backward pass.

    Attributes:
      group_size: number of neighbours on the last axis that share a scale in the saved inputs of
        norms and activation functions.
      exact: whether norms and activation functions compute from their inputs; False is the paper's
        flow, which computes from the codes, and so adds their error to the forward pass.
      input_gradient: format of the gradient G of Y in dX = G W^T: `e4m3`, `e5m2`, or `bf16`, a
        product in the dtype of the inputs.
      weight_gradient: format of G in dW = X^T G, likewise.
      storage: `fp8`; or `bf16`, which quantizes nothing: norms and activation functions save only
        their inputs, in the dtype of these, the linear layers that follow them save nothing, and
        all products run in that dtype. The forward pass then equals that of ordinary layers bit for
        bit, and the other fields must keep their defaults.

    Raises:
      ValueError: for another value, or `storage="bf16"` with another field changed.
    """

    group_size: int = 16
    exact: bool = True
    input_gradient: str = "e4m3"
    weight_gradient: str = "e4m3"
    storage: str = FP8

    def __post_init__(self) -> None:
        check_choice("storage", self.storage, (FP8, BF16))
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
            check_choice(name, getattr(self, name), _PRODUCTS)

    @classmethod
    def paper(cls, **changes: Any) -> "Recipe":
        """Return COAT's recipe: computation from the codes, gradients in E5M2 as in its kernels."""
        paper = cls(exact=False, input_gradient="e5m2", weight_gradient="e5m2")
        return dataclasses.replace(paper, **changes)

    @property
    def quantizes(self) -> bool:
        """Return whether anything is stored or multiplied in 8 bits."""
        return self.storage == FP8


DEFAULT = Recipe()


def format_of(name: str) -> Format | None:
    """Return the format of a gradient; None for a product that is not quantized."""
    return None if name == BF16 else FORMATS[name]


@dataclasses.dataclass(frozen=True)
class ArrayFunction:
    """A hashable function of arrays whose result is cast to the dtype of the first one.

    It takes `static`, then the arrays, which are first cast to f32 if `wide`.
    """

    function: Callable[..., jax.Array]
    static: Hashable
    wide: bool = True

    def __call__(self, *given: jax.Array) -> jax.Array:
        """Apply the function to arrays of any floating dtype."""
        # not by `numerics.widen`, which has no derivative
        arrays = (x.astype(jnp.float32) for x in given) if self.wide else given
        return self.function(self.static, *arrays).astype(given[0].dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """Recomputation of an activation from arrays (`given`) that the backward pass saves anyway."""

    formula: ArrayFunction = dataclasses.field(metadata={"static": True})
    given: tuple[jax.Array, ...]

    def again(self) -> jax.Array:
        """Recompute the activation."""
        return self.formula(*self.given)


@jax.tree_util.register_dataclass  # not a tuple, which Flax's Sequential would unpack
@dataclasses.dataclass(frozen=True, eq=False)
class Coded:
    """An input of matrix products, quantized once for all of them.

    Attributes:
      value: in 16 bits or f32; gradients are those of the value. Products of codes do not read it,
        and if nothing else does, XLA never computes it.
      quantized: codes in the value's shape and one scale; None with `Recipe(storage="bf16")`.
      source: with that recipe, how the products' backward pass recomputes the value.
      transposed: the codes as [k, ...], if a kernel computes the gradients of weights; the
        backward pass then saves only these.
    """

    value: jax.Array
    quantized: Quantized | None
    source: Source | None = None
    transposed: jax.Array | None = None


def value_of(x: jax.Array | Coded) -> jax.Array:
    """Return the array of an activation, quantized or not."""
    return x.value if isinstance(x, Coded) else x


# ---- quantized activations, and helpers of the custom gradients ----------------------------------


def kept(*trees: PyTree) -> PyTree:
    """Put an `optimization_barrier` over residuals.

    Otherwise XLA would delay computing codes to the backward pass and keep their unquantized
    inputs until then.
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
    """Compute an activation, quantized for matrix products; returns it and `stored`.

    `function` is elementwise, of arrays that broadcast to the first one, with a result of largest
    magnitude `absmax`; `stored` are residuals of the backward pass, if there is one (`keep`).
    """
    over_tokens, now = format_of(recipe.weight_gradient) is not None, keep and in_kernel
    codes, transposed = quantized_for_products(function, given, absmax, over_tokens, now)
    if keep:
        codes, transposed, stored = kept(codes, transposed, stored)
    return Coded(function(*given), codes, transposed=transposed), stored


def code(x: jax.Array | Coded) -> Coded:
    """Quantize an activation for matrix products, with one scale and a straight-through gradient.

    An activation that is already quantized is returned unmodified.
    """
    return x if isinstance(x, Coded) and x.quantized is not None else _code(value_of(x))


@jax.custom_vjp
def _code(x: jax.Array) -> Coded:
    return Coded(x, quantized(x, absmax_of(x, None)))


_code.defvjp(lambda x: (_code(x), None), lambda saved, g: (g.value,))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def recomputed(formula: ArrayFunction, *given: jax.Array) -> Coded:
    """Compute a formula, saving only its arguments for the backward pass.

    The backward pass recomputes the rest, and so do linear layers that take the result.
    """
    return _recomputed_forward(formula, *given)[0]


def _recomputed_forward(formula: ArrayFunction, *given: jax.Array) -> tuple[Coded, PyTree]:
    # otherwise XLA would merge the recomputation with the first computation and keep its results:
    # https://github.com/jax-ml/jax/issues/13999
    again = lax.optimization_barrier(given)
    return Coded(formula(*given), None, Source(formula, again)), again


def _recomputed_backward(formula: ArrayFunction, given: PyTree, g: Coded) -> tuple[jax.Array, ...]:
    return jax.vjp(formula, *given)[1](g.value)


recomputed.defvjp(_recomputed_forward, _recomputed_backward)
