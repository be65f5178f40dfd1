"""What an FP8 precision flow leaves open, and what travels in it."""

import dataclasses
from typing import Any

import jax

from optax_lowmem.kernels.quantized_matmul import E4M3, FORMATS, Format, Quantized

FORWARD = E4M3
BF16 = "bf16"
_PRODUCTS = ("e4m3", "e5m2", BF16)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How activations are kept in 8 bits, and which products of the backward pass run in them.

    Attributes:
      group_size: neighbours on the last axis that share a scale, where inputs of norms and
        activation functions are kept.
      exact: whether norms and activation functions compute from what they are given; False is the
        paper's flow, which computes from the codes, and so adds their error to the forward pass.
      input_gradient: format of the gradient G of Y in dX = G W^T: `e4m3`, `e5m2`, or `bf16`, a
        product in the inputs' own precision.
      weight_gradient: likewise in dW = X^T G.
    """

    group_size: int = 16
    exact: bool = True
    input_gradient: str = "e4m3"
    weight_gradient: str = "e4m3"

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise ValueError(f"group_size must be at least 1, got {self.group_size}")
        for name in ("input_gradient", "weight_gradient"):
            if getattr(self, name) not in _PRODUCTS:
                raise ValueError(
                    f"{name} must be one of {', '.join(_PRODUCTS)}, got {getattr(self, name)!r}"
                )

    @classmethod
    def paper(cls, **changes: Any) -> "Recipe":
        """COAT's: everything from codes, gradients in E5M2 as its kernels have them."""
        own: dict[str, Any] = dict(exact=False, input_gradient="e5m2", weight_gradient="e5m2")
        return cls(**own | changes)


DEFAULT = Recipe()


def format_of(name: str) -> Format | None:
    """The format of a gradient; None for a product that is not quantised."""
    return None if name == BF16 else FORMATS[name]


@jax.tree_util.register_dataclass  # no tuple: Flax's Sequential takes those apart
@dataclasses.dataclass(frozen=True, eq=False)
class Coded:
    """An activation on its way to matrix products: quantised once, for all of them.

    Attributes:
      value: in 16 bits or f32; what gradients belong to. Products do not read it, and where nothing
        else does, XLA never makes it.
      quantized: codes of its shape and one scale.
    """

    value: jax.Array
    quantized: Quantized


def value_of(x: jax.Array | Coded) -> jax.Array:
    """The array itself."""
    return x.value if isinstance(x, Coded) else x
