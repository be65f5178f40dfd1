"""One linear layer in 8 bits: forward and backward, each operation alone, bytes kept for backward.

Device time of programs looped in one jit, median of `--repeats` calls; implementations take turns.
"""

import argparse
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks import records, timing
from benchmarks.suites.linear import peers as linear_peers
from benchmarks.timing import Timed
from optax_lowmem._src.layers import quantized_matmul as kernels
from optax_lowmem._src.layers.quantized_matmul import E4M3, INT8
from optax_lowmem.layers import switchback_dot_general

# tokens x in x out: the targets, then SwitchBack's Figure 6 (dim to 4 dim and back)
SHAPES = ["16384x4096x16384", "16384x16384x4096", "32768x1280x5120", "32768x5120x1280"] + [
    f"{tokens}x{dim}x{4 * dim}"
    for tokens in (8192, 16384, 32768)
    for dim in (1024, 1280, 2048, 4096)
    if (tokens, dim) not in ((16384, 4096), (32768, 1280))
]
Dot = Callable[..., jax.Array]
LAYERS: dict[str, Dot] = {"bf16": lax.dot_general} | {
    f"{name}-{format}": switchback_dot_general(name, format)
    for name in ("switchback", "switchback_m")
    for format in ("int8", "fp8")
}
NAMES = [*LAYERS, *linear_peers.NAMES]


def _product(a: jax.Array, b: jax.Array, axes: tuple[int, int], dot: Dot = lax.dot_general) -> Any:
    return dot(a, b, (((axes[0],), (axes[1],)), ((), ())))


def linear(dot: Dot) -> Callable[..., Any]:
    """(x, w, g) -> output and both gradients of x [tokens, in] times w [in, out]."""

    def step(x: jax.Array, w: jax.Array, g: jax.Array) -> Any:
        y, pull = jax.vjp(lambda x, w: _product(x, w, (1, 0), dot), x, w)
        return y, *pull(g)

    return step


def step_of(name: str) -> Callable[..., Any]:
    return linear(LAYERS[name]) if name in LAYERS else linear_peers.step(name)


def operations(x: jax.Array, w: jax.Array, g: jax.Array) -> dict[str, tuple[Any, ...]]:
    """Each operation of a layer alone, with its arguments (Figure 6, left)."""
    found: dict[str, tuple[Any, ...]] = {
        "bf16 forward": (lambda x, w: _product(x, w, (1, 0)), x, w),
        "bf16 input gradient": (lambda g, w: _product(g, w, (1, 1)), g, w),
        "bf16 weight gradient": (lambda x, g: _product(x, g, (0, 0)), x, g),
    }
    for to in (INT8, E4M3):
        rows, whole = (functools.partial(kernels.quantize, axes=i, to=to) for i in (1, None))
        transposed = functools.partial(kernels.quantize_transposed, axes=None, to=to)
        times = functools.partial(kernels.multiply, sums=1, dtype=x.dtype)
        found |= {
            f"{to.name} quantize x": (rows, x),
            f"{to.name} quantize g": (rows, g),
            f"{to.name} quantize w": (whole, w),
            f"{to.name} quantize w transposed": (transposed, w),
            f"{to.name} forward": (times, rows(x), transposed(w)),
            f"{to.name} input gradient": (times, rows(g), whole(w)),
        }
    return found


def sizes(shape: str) -> tuple[int, ...]:
    return tuple(map(int, shape.split("x")))


def operands(shape: str) -> tuple[jax.Array, ...]:
    tokens, width, out = sizes(shape)
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((tokens, width), (width, out), (tokens, out))
    return tuple(jax.random.normal(*one, jnp.bfloat16) for one in zip(keys, shapes, strict=True))


def saved_bytes(dot: Dot, shape: str) -> int:
    """Bytes kept between forward and backward, weights not counted (from shapes alone)."""
    tokens, width, out = sizes(shape)
    x, w = (jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in ((tokens, width), (width, out)))

    def kept(x: jax.Array, w: jax.Array) -> Any:
        return jax.vjp(lambda x, w: _product(x, w, (1, 0), dot), x, w)[1]

    arrays = [leaf for leaf in jax.tree.leaves(jax.eval_shape(kept, x, w)) if leaf.shape != w.shape]
    return sum(leaf.size * leaf.dtype.itemsize for leaf in arrays)


def rows_of(shape: str, names: list[str], repeats: int, alone: bool) -> records.Rows:
    args = operands(shape)
    tokens, width, out = sizes(shape)
    guess = 6 * tokens * width * out / (1e11 if jax.default_backend() == "cpu" else 500e12)
    timed = {name: Timed(step_of(name), args, guess) for name in names}
    if alone:
        for name, (run, *own) in operations(*args).items():
            timed[name] = Timed(run, tuple(own), guess / 4)
    found = []
    for name, times in timing.in_turns(timed, repeats).items():
        value, spread = timing.middle(times)
        metric = "device_ms" if name in names else "operation_ms"
        found.append(records.record("linear", shape, name, metric, *value, **spread))
    for name in (name for name in names if name in LAYERS):
        size = saved_bytes(LAYERS[name], shape)
        found.append(records.record("linear", shape, name, "saved_bytes", size, "bytes"))
    return found


@records.suite(
    shapes={"nargs": "+", "default": SHAPES, "metavar": "TOKENSxINxOUT"},
    impl={"nargs": "+", "choices": NAMES, "default": NAMES, "metavar": "NAME",
          "help": f"of {', '.join(NAMES)}"},
    alone={"action": "store_true", "help": "each operation alone too"},
    repeats={"type": int, "default": 5},
)  # fmt: skip
def main(args: argparse.Namespace) -> Iterator[records.Rows]:
    missing = {name: linear_peers.missing_reason(name) for name in linear_peers.NAMES}
    for name in filter(missing.get, args.impl):
        print(missing[name])
    names = [name for name in args.impl if not missing.get(name)]
    return (rows_of(shape, names, args.repeats, args.alone) for shape in args.shapes)
