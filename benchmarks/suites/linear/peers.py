"""A linear layer in 8 bits by other libraries, where they are installed (for `linear`).

`qwix-int8`, `qwix-fp8`: Qwix' training product, all three products quantized, a scale a row.
`flax-fp8`: Flax's `Fp8DirectDotGeneralOp`: E4M3 forward, E5M2 gradients, delayed scaling with a
history of 1024 maxima, which is renewed by each run as in training.
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Step = Callable[[jax.Array, jax.Array, jax.Array], Any]
QWIX = {"qwix-int8": "int8", "qwix-fp8": "float8_e4m3fn"}
NAMES = (*QWIX, "flax-fp8")
SUMS = (((1,), (0,)), ((), ()))
HISTORY = 1024  # Flax's own length


def missing_reason(name: str) -> str | None:
    """Return why an implementation cannot be timed here; None: it can."""
    package = "qwix" if name in QWIX else "flax"
    if importlib.util.find_spec(package) is None:
        return f"{name} is left out: {package} is not installed"
    return None


def step(name: str) -> Step:
    """(x [tokens, in], w [in, out], g) -> output, both gradients, and what else it renews."""
    return _flax if name == "flax-fp8" else _qwix(QWIX[name])


def _qwix(to: str) -> Step:
    from qwix._src.core import dot_general_qt as qt  # its public way in rewrites whole models

    names = ("lhs_qtype", "rhs_qtype", "dlhs_grad_qtype", "drhs_grad_qtype")
    config = qt.DotGeneralQtConfig(**dict.fromkeys(names, to))

    def run(x: jax.Array, w: jax.Array, g: jax.Array) -> Any:
        y, pull = jax.vjp(lambda x, w: qt.dot_general_qt(x, w, SUMS, config), x, w)
        return y, *pull(g)

    return run


def _flax(x: jax.Array, w: jax.Array, g: jax.Array) -> Any:
    from flax.linen import fp8_ops

    def product(x: jax.Array, w: jax.Array, own: dict[str, jax.Array]) -> jax.Array:
        return fp8_ops.fp8_scaled_dot_general(
            x, w, SUMS, preferred_element_type=x.dtype, quantize_compute_type=x.dtype, **own
        )

    names = ("lhs", "rhs", "grad")
    own = {f"{name}_scale": jnp.ones(1) for name in names}
    own |= {f"{name}_amax_history": jnp.zeros(HISTORY) for name in names}
    y, pull = jax.vjp(product, x, w, own)
    return y, *pull(g)
