"""A Llama's layer with activations in FP8: forward, backward, bytes kept (COAT, Tables 2 and 7).

Device time of programs looped in one jit, median of `--repeats` calls; implementations take turns.
"""

import argparse
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import records, timing
from benchmarks.records import Rows
from benchmarks.suites.activations import bytes as activation_bytes
from benchmarks.suites.activations import layers as activation_layers
from benchmarks.suites.activations.layers import Layer, Params, Shape
from benchmarks.timing import Timed
from optax_lowmem.layers import fp8_flow
from optax_lowmem.layers.fp8_flow import Recipe

SHAPES = [f"h{width}-s{length}-b4" for width in (2048, 4096) for length in (2048, 4096)]
DEFAULT = [
    "bf16", "fp8-flow", "fp8-flow-bf16-dw", "fp8-flow-bf16-gradients", "fp8-flow-cached",
    "flax-fp8", "bf16-lean",
]  # fmt: skip
NORMS = ["4096x1024", "4096x2048", "4096x4096", "4096x8192", "8192x4096"]
PAPER = "h3072-s2048-b4"  # with an MLP of 8/3 the width, as Table 2 counts
PARTS = ("layers", "norms", "errors", "bytes")
DEPTH = 4  # layers of a stack, for errors
SIZES = (4, 8, 16, 32, 64)  # of groups


def row(case: str, name: str, metric: str, value: float, unit: str, **more: Any) -> dict[str, Any]:
    return records.record("activations", case, name, metric, value, unit, **more)


def kept(case: str, name: str, kind: str = "cudnn") -> Rows:
    """Bytes that a layer keeps for its backward pass, from shapes alone, and what made them.

    With XLA's attention, which ours computes anew, its name says so.
    """
    report = activation_bytes.kept(Shape.parse(case), name, kind)
    label = name if kind == "cudnn" else f"{name}, {kind} attention"
    more = {"attention": kind, "columns": activation_bytes.by_column(report)}
    size = report.total_bytes
    values = {"saved_bytes": (size, "bytes"), "saved_units": (size / report.unit, "U")}
    return records.records_of("activations", case, label, values, **more)


def byte_rows(case: str, names: list[str]) -> Rows:
    """Of each layer but Flax's, and of ours with XLA's attention."""
    wanted = [(name, "cudnn") for name in names if name != activation_layers.FLAX]
    wanted += [(name, "xla") for name in names if name in activation_layers.RECIPES][:1]
    return [one for name, kind in wanted for one in kept(case, name, kind)]


def layer_rows(case: str, names: list[str], repeats: int) -> Rows:
    shape, kind = Shape.parse(case), "cudnn" if timing.on_gpu() else "xla"
    size = (2, shape.batch, shape.length, shape.width)
    x, g = jax.random.normal(jax.random.key(1), size, jnp.bfloat16)
    flops = 2 * shape.batch * shape.length * shape.width * (4 * shape.width + 3 * shape.hidden)
    guess = flops / (400e12 if timing.on_gpu() else 50e9)  # seconds of a forward pass, about
    timed: dict[str, Timed] = {}
    for name in names:
        layer, draw = activation_layers.make(name, shape, kind)
        params = jax.jit(draw)()
        timed[f"{name} forward"] = Timed(layer, (params, x), guess)
        timed[name] = Timed(activation_layers.backward(layer), (params, x, g), 3 * guess)
    times, rows = timing.in_turns(timed, repeats), []
    for name in names:
        (both, _), spread = timing.middle(times[name])
        (forward, _), _ = timing.middle(times[f"{name} forward"])
        rows.append(row(case, name, "device_ms", both, "ms", **spread, attention=kind))
        rows.append(row(case, name, "forward_ms", forward, "ms"))
        rows.append(row(case, name, "backward_ms", both - forward, "ms"))
    return rows


def scalings() -> dict[str, Callable[..., Any]]:
    """A norm, and what quantizing its result for a product takes beside it, of (x, scale)."""
    norm, quantized = activation_layers.normalised, fp8_flow.quantized

    def after_norm(quantize: Callable[[jax.Array], Any]) -> Callable[..., Any]:
        return lambda x, scale: quantize(norm(x, scale))

    def just_in_time(y: jax.Array) -> Any:  # a pass of its own for the maximum
        y = jax.lax.optimization_barrier(y)
        return quantized(y, jnp.abs(y).max(keepdims=True).astype(jnp.float32))

    def flow(x: jax.Array, scale: jax.Array) -> Any:  # with the codes of x that are kept
        y, pull = jax.vjp(fp8_flow.rms_norm, x, scale)
        return y.quantized, jax.tree.leaves(pull)

    return {
        "bf16": norm,
        "group-maxima": after_norm(lambda y: (y, fp8_flow.group_absmax(y, 16))),  # the first stage
        # with the maximum of a step before
        "delayed-scaling": after_norm(lambda y: quantized(y, jnp.full((1, 1), 4.0))),
        "just-in-time": after_norm(just_in_time),
        "group-scaling": after_norm(lambda y: quantized(y, fp8_flow.tensor_absmax(y, 16))),
        "fp8-flow": flow,
    }


def norm_rows(case: str, repeats: int) -> Rows:
    size = tuple(map(int, case.split("x")))
    x = jax.random.normal(jax.random.key(0), size, jnp.bfloat16)
    guess = 6 * x.size / (1e12 if timing.on_gpu() else 5e8)
    args = (x, jnp.ones(size[1], jnp.float32))
    timed = {name: Timed(run, args, guess) for name, run in scalings().items()}
    found = []
    for name, times in timing.in_turns(timed, repeats).items():
        value, spread = timing.middle(times)
        found.append(row(f"norm-{case}", name, "device_ms", *value, **spread))
    return found


def drawn(shape: tuple[int, ...], seed: int) -> jax.Array:
    """Activations as transformers have them: tokens of several sizes, and a few large channels."""
    keys = jax.random.split(jax.random.key(seed), 4)
    x = jax.random.normal(keys[0], shape)
    tokens = jnp.exp(jax.random.normal(keys[1], (*shape[:-1], 1)))
    large = jax.random.uniform(keys[2], shape[-1:]) < 0.01
    channels = jnp.where(large, 20.0, 1.0) * jnp.exp(jax.random.normal(keys[3], shape[-1:]) / 2)
    return (x * tokens * channels).astype(jnp.bfloat16)


def stacked(block: Layer, many: Params) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
    """x -> what `DEPTH` layers add to it, and to a fixed gradient on its way back."""

    # weights are arguments: as constants they would be folded, stored and compressed each time
    def run(many: Params, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def forward(x: jax.Array) -> jax.Array:
            return jax.lax.scan(lambda x, own: (block(own, x), None), x, many)[0]

        y, pull = jax.vjp(forward, x)
        g = jax.random.normal(jax.random.key(7), y.shape, y.dtype)
        return y - x, pull(g)[0] - g

    return functools.partial(jax.jit(run), many)


def mse(found: jax.Array, want: jax.Array) -> float:
    """Mean squared error, of the mean square."""
    found, want = (a.astype(jnp.float32) for a in (found, want))
    return float(jnp.mean((found - want) ** 2) / jnp.mean(want**2))


def by_group_size(shape: Shape) -> Rows:
    """Errors of the output and of the first gradient, beside bf16's, by the size of groups."""
    leaves, tree = jax.tree.flatten(activation_layers.weights(shape))

    def noisy(key: jax.Array) -> Params:  # other weights for each layer
        own = zip(leaves, jax.random.split(key, len(leaves)), strict=True)
        return tree.unflatten(
            w if w.ndim < 2 else jax.random.normal(k, w.shape, w.dtype) * w.std() for w, k in own
        )

    keys = jax.random.split(jax.random.key(3), DEPTH)
    many = jax.tree.map(lambda *w: jnp.stack(w), *map(noisy, keys))
    x = drawn((shape.batch, shape.length, shape.width), 0)
    want = stacked(activation_layers.plain_block(shape, "xla", jax.lax.dot_general), many)(x)
    # a scale for each number is none: what remains is the error of the linear layers
    recipes = {"linear alone": Recipe.paper(group_size=1)}
    recipes |= {f"group {size}": Recipe.paper(group_size=size) for size in SIZES}
    recipes |= {f"group {size}, exact": Recipe(group_size=size) for size in SIZES}
    found, case = [], f"errors-h{shape.width}"
    for name, recipe in recipes.items():
        y, dx = stacked(activation_layers.fp8_block(shape, "xla", recipe), many)(x)
        found.append(row(case, name, "forward_error", mse(y, want[0]), ""))
        found.append(row(case, name, "backward_error", mse(dx, want[1]), ""))
    for size in SIZES:  # of bytes beside those of codes (Table 10's overhead)
        codes, scales = jax.eval_shape(lambda x, n=size: fp8_flow.store(x, n), x)
        share = scales.size * scales.dtype.itemsize / codes.size
        found.append(row(case, f"group {size}", "scale_share", share, ""))
    return found


def in_blocks(x: jax.Array, side: int) -> jax.Array:
    """Values of codes with a scale for each side x side block of tokens and channels."""
    rows, width = x.shape
    parts = x.reshape(rows // side, side, width // side, side).swapaxes(1, 2)
    flat = parts.reshape(-1, side * side)
    back = fp8_flow.restore(fp8_flow.store(flat, side * side), side * side)
    return back.reshape(parts.shape).swapaxes(1, 2).reshape(x.shape)


def across_tokens() -> Rows:
    """Error of a norm's input in B x B blocks and in 1 x B^2 groups."""
    x = drawn((1024, 1024), 1).astype(jnp.float32)

    def normed(x: jax.Array) -> jax.Array:
        return fp8_flow.rms_norm(x, jnp.ones(1024)).value

    @functools.partial(jax.jit, static_argnums=1)
    def both(x: jax.Array, side: int) -> dict[str, jax.Array]:
        size = side * side
        groups = fp8_flow.restore(fp8_flow.store(x, size), size)
        return {"block": normed(in_blocks(x, side)), "group": normed(groups)}

    want, found = normed(x), []
    for side in (2, 4, 8, 16, 32):
        for name, y in both(x, side).items():
            found.append(row(f"elements-{side * side}", name, "norm_error", mse(y, want), ""))
    return found


@records.suite(
    shapes={"nargs": "+", "default": SHAPES, "metavar": "hWIDTH-sLENGTH-bBATCH"},
    impl={"nargs": "+", "choices": activation_layers.NAMES, "default": DEFAULT, "metavar": "NAME",
          "help": f"of {', '.join(activation_layers.NAMES)}"},
    norms={"nargs": "+", "default": NORMS, "metavar": "ROWSxWIDTH"},
    only={"nargs": "+", "choices": PARTS, "default": PARTS, "help": "parts (default: all)"},
    repeats={"type": int, "default": 5},
)  # fmt: skip
def main(args: argparse.Namespace) -> Iterator[Rows]:
    if "layers" in args.only:
        yield from (layer_rows(case, args.impl, args.repeats) for case in args.shapes)
    if "norms" in args.only:
        yield from (norm_rows(case, args.repeats) for case in args.norms)
    if "errors" in args.only:
        yield by_group_size(Shape(256, 128, 4)) + across_tokens()
    if "bytes" in args.only:
        yield from (byte_rows(case, args.impl) for case in dict.fromkeys((PAPER, *args.shapes)))
