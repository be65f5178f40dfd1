"""AdamW with factored second moments, on trial in pairs: the means alone are in the package now.

v of a matrix as the means of its rows and of its columns (`flash_factored_adamw` has them beside
split weights), alone or with a code of 4 bits for what each element is of their product. v's codes
are rounded stochastically; the rounding of m's is chosen.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import optax_lowmem as lowmem
from optax_lowmem import codecs

GROUP = 64  # neighbours that share a scale


class Factored(NamedTuple):
    """The second moment of a leaf of matrices [..., m, n].

    Attributes:
      rows: mean of v over each row, [..., m, 1].
      columns: mean of v over each column, [..., 1, n].
      ratio: v over the product of both, as a code has it; None where it is taken as 1.
    """

    rows: jax.Array
    columns: jax.Array
    ratio: jax.Array | None

    @property
    def product(self) -> jax.Array:
        """R C over the mean of R, [..., m, n]."""
        mean = self.rows.mean(-2, keepdims=True)
        return self.rows * self.columns / jnp.where(mean > 0, mean, 1)

    @property
    def value(self) -> jax.Array:
        return self.product if self.ratio is None else self.product * self.ratio


def _start(p: jax.Array, codec: codecs.GroupCodec | None) -> Any:
    if p.ndim < 2:
        return jnp.zeros_like(p)
    shapes = (*p.shape[:-1], 1), (*p.shape[:-2], 1, p.shape[-1])
    return Factored(*(jnp.zeros(s, p.dtype) for s in shapes), jnp.zeros_like(p) if codec else None)


def _moved(v: Any, square: jax.Array, b2: Any, codec: Any, key: jax.Array, shrink: float) -> Any:
    """Return the second moment after a step, of the squares of the gradient.

    Ratios average (g^2 / product + shrink) / (1 + shrink): a shrink of 1 takes them halfway to 1.
    """

    def mean(old: jax.Array, new: jax.Array) -> jax.Array:
        return b2 * old + (1 - b2) * new

    if not isinstance(v, Factored):
        return mean(v, square)
    rows = mean(v.rows, square.mean(-1, keepdims=True))
    found = Factored(rows, mean(v.columns, square.mean(-2, keepdims=True)), None)
    if codec is None:
        return found
    product = found.product
    shrunk = (square + shrink * product) / (1 + shrink)
    ratio = mean(v.value, shrunk) / jnp.where(product > 0, product, 1)
    stored = codecs.encode_array(codec, ratio, GROUP, jax.random.uniform(key, ratio.shape))
    length = ratio.shape[-1]
    return found._replace(ratio=codecs.decode_array(codec, *stored, GROUP, length=length))


def scale_by_factored_adam(
    b1: float,
    b2: float,
    eps: float = 1e-8,
    codec: codecs.GroupCodec | None = None,
    shrink: float = 0,
) -> optax.GradientTransformation:
    """`optax.scale_by_adam` with a factored second moment.

    Args:
      b1: decay of the first moment.
      b2: decay of the second.
      eps: added to its root.
      codec: of the ratios of v's elements to the product of its means; None for ratios of 1.
      shrink: how far ratios are drawn to 1.
    """

    def init(params: Any) -> optax.ScaleByAdamState:
        nu = jax.tree.map(lambda p: _start(p, codec), params)
        return optax.ScaleByAdamState(jnp.int32(0), optax.tree.zeros_like(params), nu)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        count = state.count + 1
        mu = optax.tree.update_moment(grads, state.mu, b1, 1)
        leaves, treedef = jax.tree.flatten(grads)
        keys = jax.random.split(jax.random.fold_in(jax.random.key(0), count), len(leaves))
        own = [
            _moved(v, g * g, b2, codec, key, shrink)
            for v, g, key in zip(treedef.flatten_up_to(state.nu), leaves, keys, strict=True)
        ]
        unbiased = optax.tree.bias_correction(mu, b1, count)
        values = [v.value if isinstance(v, Factored) else v for v in own]
        nu = optax.tree.bias_correction(jax.tree.unflatten(treedef, values), b2, count)
        steps = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), unbiased, nu)
        return steps, optax.ScaleByAdamState(count, mu, jax.tree.unflatten(treedef, own))

    return optax.GradientTransformation(init, update)


def factored(
    schedule: optax.Schedule,
    *,
    b1: float,
    b2: float,
    weight_decay: float,
    mask: Any,
    mu: codecs.GroupCodec | None = None,
    ratio: codecs.GroupCodec | None = None,
    rounding: str = "stochastic",
    shrink: float = 0,
) -> optax.GradientTransformation:
    """AdamW with a factored second moment, and m in `mu`'s codes by `rounding`."""
    tx = optax.chain(
        scale_by_factored_adam(b1, b2, codec=ratio, shrink=shrink),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(schedule),
    )
    if mu is None:
        return tx
    return lowmem.compand_momentum(tx, codec=mu, group_size=GROUP, rounding=rounding)
