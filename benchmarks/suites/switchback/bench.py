"""SwitchBack's Figures 1 and 2 on a Llama of bytes, and appendix D.

`run` and `large` store curves in benchmarks/results/switchback.npz after each variant.
"""

import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import records
from benchmarks.suites.switchback.training import PRESETS, VARIANTS, Experiment
from benchmarks.variants import Part, built, parser, usual
from optax_lowmem import layers
from optax_lowmem._src.layers.quantized_matmul import INT8, quantize

CURVES = records.RESULTS / "switchback.npz"
# what a large batch is told apart with; all variants of a run at a usual batch
PARTS = {
    "run": list(VARIANTS),
    "large": ["standard", "standard-other-start", "switchback-int8", "switchback-fp8", "llm_int8"],
    "variance": [],
}
WIDE = 128  # of the axes that are not summed over: 16,384 sums
# 1280 and 5120 are the forward products of CLIP ViT-Huge (appendix D.3)
LENGTHS = (256, 1024, 1280, 4096, 5120, 16384, 65536)
# The products of X [tokens, in] and W [in, out], and which of the three sizes each sums over.
PRODUCTS = {"forward": 1, "input gradient": 2, "weight gradient": 0}
# Of variance 1. The maxima of n numbers of Student's grow as the fourth root of n.
DRAWS: dict[str, Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]] = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "student-t(4)": lambda rng, shape: rng.standard_t(4, shape) / 2**0.5,
}


def results(variant: str, x: jax.Array, w: jax.Array, g: jax.Array) -> dict[str, jax.Array]:
    dot = layers.switchback_dot_general(variant)

    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        return dot(x, w, (((1,), (0,)), ((), ())), precision=jax.lax.Precision.HIGHEST)

    y, pull = jax.vjp(layer, x, w)
    return dict(zip(PRODUCTS, (y, *pull(g)), strict=True))


def _quantizer_variance(x: jax.Array, axis: int) -> jax.Array:
    """Mean square of the error of int8, row-wise along `axis`."""
    codes, scales = quantize(x, axis, INT8)
    return jnp.mean((codes.astype(jnp.float32) * scales - x) ** 2)


@functools.partial(jax.jit, static_argnames="product")
def _spread(product: str, x: jax.Array, w: jax.Array, g: jax.Array) -> dict[str, jax.Array]:
    exact = results("standard", x, w, g)[product]
    error = jnp.mean((results("llm_int8", x, w, g)[product] - exact) ** 2)
    # the operands, with the axis that is summed over
    u, v = {
        "forward": ((x, 1), (w, 0)),
        "input gradient": ((g, 1), (w, 1)),
        "weight gradient": ((x, 0), (g, 0)),
    }[product]
    of_u, of_v = _quantizer_variance(*u), _quantizer_variance(*v)
    # equation 12 with a variance of its own for each operand
    more = of_u * jnp.mean(v[0] ** 2) + of_v * jnp.mean(u[0] ** 2) + of_u * of_v
    return {
        "error": error,
        "predicted": u[0].shape[u[1]] * more,
        "relative": error / jnp.mean(exact**2),
    }


def spread(product: str, length: int, draw: str = "normal") -> dict[str, float]:
    """Variances of the error of one product: measured, by equation 12, over that of the sums.

    Equation 12 has the measured variance of the quantizer. Of X [tokens, in], W [in, out] and the
    gradient G [tokens, out], one size is `length`.
    """
    sizes = [WIDE] * 3
    sizes[PRODUCTS[product]] = length
    tokens, width, out = sizes
    rng, shapes = np.random.default_rng(0), ((tokens, width), (width, out), (tokens, out))
    operands = (jnp.asarray(DRAWS[draw](rng, shape), jnp.float32) for shape in shapes)
    return {name: float(value) for name, value in _spread(product, *operands).items()}


def variances(small: bool) -> records.Rows:
    rows, lengths = [], LENGTHS[:2] if small else LENGTHS
    for draw, product, length in itertools.product(DRAWS, PRODUCTS, lengths):
        found = spread(product, length, draw)
        values = {f"{name}_variance": (value, None) for name, value in found.items()}
        case = f"variance/{product} of {length}"
        rows += records.records_of("switchback", case, draw, values, length=length)
    return rows


def main(arguments: list[str] | None = None) -> None:
    made = parser(__doc__, 530, CURVES, VARIANTS)
    made.add_argument("--part", nargs="+", choices=PARTS, default=["run"])
    args = made.parse_args(arguments)
    for part in args.part:
        if part == "variance":
            rows = variances(args.preset == "smoke")
            records.show(rows)
            records.keep(rows, args.record)
        else:
            make = functools.partial(built, args, Experiment, usual(PRESETS, args.preset)[part])
            Part(args, make, args.variants or PARTS[part], CURVES, part).train_all()
