"""Errors of activations in FP8: Table 10's groups, and Figure 4a's blocks against groups."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.suites.activations.layers import (
    Layer,
    Params,
    Shape,
    fp8_block,
    plain_block,
    weights,
)  # fmt: skip
from optax_lowmem.layers import fp8_flow
from optax_lowmem.layers.fp8_flow import Recipe

DEPTH = 4
SIZES = (4, 8, 16, 32, 64)
Row = Callable[..., dict[str, Any]]


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

    return partial(jax.jit(run), many)


def mse(found: jax.Array, want: jax.Array) -> float:
    """Mean squared error, of the mean square."""
    found, want = (a.astype(jnp.float32) for a in (found, want))
    return float(jnp.mean((found - want) ** 2) / jnp.mean(want**2))


def by_group_size(row: Row, shape: Shape) -> list[dict[str, Any]]:
    """Errors of the output and of the first gradient, beside bf16's, by the size of groups."""
    leaves, tree = jax.tree.flatten(weights(shape))

    def noisy(key: jax.Array) -> Params:  # other weights for each layer
        own = zip(leaves, jax.random.split(key, len(leaves)), strict=True)
        return tree.unflatten(
            w if w.ndim < 2 else jax.random.normal(k, w.shape, w.dtype) * w.std() for w, k in own
        )

    keys = jax.random.split(jax.random.key(3), DEPTH)
    many = jax.tree.map(lambda *w: jnp.stack(w), *map(noisy, keys))
    x = drawn((shape.batch, shape.length, shape.width), 0)
    want = stacked(plain_block(shape, "xla", jax.lax.dot_general), many)(x)
    # a scale for each number is none: what remains is the error of the linear layers
    recipes = {"linear alone": Recipe.paper(group_size=1)}
    recipes |= {f"group {size}": Recipe.paper(group_size=size) for size in SIZES}
    recipes |= {f"group {size}, exact": Recipe(group_size=size) for size in SIZES}
    found, case = [], f"errors-h{shape.width}"
    for name, recipe in recipes.items():
        y, dx = stacked(fp8_block(shape, "xla", recipe), many)(x)
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


def across_tokens(row: Row) -> list[dict[str, Any]]:
    """Error of a norm's input in B x B blocks and in 1 x B^2 groups."""
    x = drawn((1024, 1024), 1).astype(jnp.float32)

    def normed(x: jax.Array) -> jax.Array:
        return fp8_flow.rms_norm(x, jnp.ones(1024)).value

    @partial(jax.jit, static_argnums=1)
    def both(x: jax.Array, side: int) -> dict[str, jax.Array]:
        size = side * side
        groups = fp8_flow.restore(fp8_flow.store(x, size), size)
        return {"block": normed(in_blocks(x, side)), "group": normed(groups)}

    want, found = normed(x), []
    for side in (2, 4, 8, 16, 32):
        for name, y in both(x, side).items():
            found.append(row(f"elements-{side * side}", name, "norm_error", mse(y, want), ""))
    return found


def rows(row: Row) -> list[dict[str, Any]]:
    return by_group_size(row, Shape(256, 128, 4)) + across_tokens(row)
