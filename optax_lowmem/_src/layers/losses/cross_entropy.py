"""Cross-entropy of a linear head, with the logits of one chunk of tokens at a time.

`products` computes a chunk's three matrix products, in the input dtype or in FP8.
"""

import dataclasses
import math
import operator
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import CustomVJPPrimal as Primal
from jax.custom_derivatives import SymbolicZero
from jax.lax import PrecisionLike
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from optax_lowmem._src.arrays import numerics, varying
from optax_lowmem._src.arrays.hyperparameters import check_choice
from optax_lowmem._src.arrays.sharding import reshard
from optax_lowmem._src.arrays.shards import axes_of
from optax_lowmem._src.arrays.typing import PyTree, T
from optax_lowmem._src.layers.losses.products import (
    FP8,
    FP8_INPUTS,
    INPUT,
    PRODUCTS,
    HeadCodes,
    InFp8,
    InInputs,
    f32_or_more,
    quantize_head,
)

_REDUCTIONS = ("mean", "sum", "none")
_CHUNK_LOGITS = 2**28  # per device; 1 GiB in f32, large enough for efficient products


def linear_cross_entropy(
    hidden: jax.Array,
    head: jax.Array,
    labels: jax.Array,
    *,
    weights: jax.Array | None = None,
    reduction: str = "mean",
    vocab_axis: int = 1,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    chunk_tokens: int | None = None,
    products: str = INPUT,
    precision: PrecisionLike = None,
    mesh: Mesh | AbstractMesh | None = None,
    specs: tuple[P, P] | None = None,
) -> jax.Array:
    r"""Return the cross-entropy of `labels` under softmax(hidden @ head), without all the logits.

    Equal, to rounding, to `optax.softmax_cross_entropy_with_integer_labels(hidden @ head, labels)`.
    Under differentiation the forward pass also computes each chunk's gradients, while its logits
    exist: three products per chunk, as with all logits, and no recomputation.

    Args:
      hidden: [..., width], in f32 or 16 bits.
      head: [width, vocab], the kernel of Flax's dense layers.
      labels: [...], integers. One outside the vocabulary gives NaN, unless its weight is 0.
      weights: [...], factor of each token's loss; booleans are a mask. A token of weight 0 does
        not affect the result, even with an invalid label.
      reduction: `mean` divides the sum by the sum of the weights (0 if all are 0); `sum`; `none`
        returns [...], and recomputes the logits for the gradient.
      vocab_axis: 0 for a head [vocab, width]: a tied embedding.
      z_loss: z adds z * log(sum(exp(logits)))^2 to each token's loss.
      soft_cap: c replaces the logits by c * tanh(logits / c).
      chunk_tokens: maximum number of tokens per chunk (per device, if shardings are known); by
        default as many as have 2^28 logits.
      products: dtype of the three products: `input`, that of `hidden` and `head`; `fp8`, FP8;
        `fp8-gradients`, FP8 except for the logits, so that the loss does not change.
      precision: precision of products that are not in FP8, as in `jax.lax.dot`.
      mesh: mesh of `specs`, for Auto axes.
      specs: partition specs of `hidden` and `head` on the mesh. Each device then sums its gradient
        of the head over all chunks before one reduction across devices, and a head with a sharded
        width is gathered once. Not needed on Explicit axes, where types have the specs. Without
        specs the result is the same, and XLA chooses the communication of each chunk.

    Returns:
      A scalar in f32, or [...] with `reduction="none"`.

    Raises:
      ValueError: for invalid shapes, reduction, specs or products; for float64 in FP8; for a
        precision if all products are in FP8.
      TypeError: for arguments that are no arrays; for options that are traced or no numbers; for
        second derivatives of products in FP8.

    Memory: the logits of one chunk, in f32 and in the dtype of the products, and one gradient of
    the head in f32, which is returned in the head's dtype. In FP8 also the head's codes during the
    call, 1 byte per parameter for the logits and 1 for the gradient of `hidden`, and 1 byte per
    logit of a chunk.

    Numerics: logits, the softmax and all sums are f32; the gradient of the logits is rounded to the
    dtype of `hidden` and `head` for its products. `hidden`, `head` and `weights` have gradients,
    and only those requested are computed. Forward mode is not supported.

    Numerics in FP8: z = s_h s_W Q(h) Q(W) for a row h of `hidden`, dh = s_g s_W Q(g) Q(W)^T for the
    gradient g of its logits, and dW = s Q(s_g H)^T Q(G), where the tokens' scales s_g are factors
    of their hidden states. Codes are E4M3; those of g are E5M2, since most probabilities of a large
    vocabulary are far below the label's. The head has one scale, h and g one per token, s_g H one
    per chunk: a token's loss and gradient depend neither on other tokens nor on chunks. The softmax
    and its sums are f32. The relative error of an E4M3 code is at most 2^-4, and 2.7 % RMS. The
    error of a logit is at most (2^-3 + 2^-8) sum_k |h_k W_kv|, and 3.7 % of the root of
    sum_k (h_k W_kv)^2 RMS (for numbers under 2^-15 of their scale's largest, the error is 2^-10 of
    a code's unit instead). The error of a loss is at most the largest error of its logits plus that
    of its label's logit. If the RMS error of losses is d, their mean is about d^2 / 2 higher.
    Gradients treat rounding as the identity.

    On a mesh in FP8: the shards of a vocabulary share the head's scale (one scalar is reduced per
    call), so the loss equals that of one device. With shardings known (`specs`, Explicit axes),
    s_g H has one scale per device, and g one per shard of the vocabulary.

    Inside a `shard_map`: the loss of this device's tokens; the head must be whole on each device.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from optax_lowmem import layers
      >>> hidden, head = jnp.ones((2, 3, 8)), jnp.zeros((8, 5))
      >>> labels = jnp.zeros((2, 3), jnp.int32)
      >>> print(f"{layers.linear_cross_entropy(hidden, head, labels):.4f}")  # log(5)
      1.6094
    """
    given = {"hidden": hidden, "head": head, "labels": labels, "weights": weights}
    for name, x in given.items():
        if x is not None and not hasattr(x, "dtype"):
            raise TypeError(
                f"{name} is a {type(x).__name__}, not an array: make it one with jnp.asarray"
            )
    z_loss = _option("z_loss", z_loss, float, "a number")
    if soft_cap is not None:
        soft_cap = _option("soft_cap", soft_cap, float, "a number")
    if chunk_tokens is not None:
        chunk_tokens = _option("chunk_tokens", chunk_tokens, operator.index, "an int")
    check_choice("reduction", reduction, _REDUCTIONS)
    options = vocab_axis, z_loss, soft_cap, chunk_tokens, products, precision
    loss = _Loss(*options, head_dtype=str(head.dtype))
    _check_arguments(loss, hidden, head, labels, weights)
    layout = _layout(hidden, head, labels, mesh, specs, vocab_axis)
    if weights is not None:
        kind = weights.dtype if jnp.issubdtype(weights.dtype, jnp.floating) else jnp.float32
        weights = weights.astype(jnp.promote_types(jnp.float32, kind))
    if layout is not None:  # on Auto axes shard_map reshards
        hidden = layout.place(hidden, layout.of_hidden)
        labels = layout.place(labels, layout.of_tokens)
        weights = None if weights is None else layout.place(weights, layout.of_tokens)
    loss = dataclasses.replace(loss, layout=layout)
    hidden, head, labels, weights = varying.alike(hidden, head, labels, weights)
    if reduction == "none":
        losses = _losses(loss, hidden, head, labels)
        return losses if weights is None else _without_masked(losses, weights) * weights
    total = _loss_sum(loss, hidden, head, labels, weights)
    if reduction == "sum":
        return total
    if weights is None:
        return total / labels.size
    of_all = weights.sum()
    return total / jnp.where(of_all == 0, jnp.ones_like(of_all), of_all)


def _check_arguments(
    loss: "_Loss", hidden: jax.Array, head: jax.Array, labels: jax.Array, weights: jax.Array | None
) -> None:
    axis = loss.vocab_axis
    if axis not in (0, 1):
        raise ValueError(f"vocab_axis must be 0 or 1, an axis of the head, got {axis!r}")
    if head.ndim != 2 or hidden.ndim == 0 or hidden.shape[-1] != head.shape[1 - axis]:
        shape = "[vocab, width]" if axis == 0 else "[width, vocab]"
        raise ValueError(
            f"hidden{list(hidden.shape)} and head{list(head.shape)}: with vocab_axis={axis} pass "
            f"[..., width] and {shape}"
        )
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(f"labels must be integers, got {labels.dtype}")
    for name, given in (("labels", labels), ("weights", weights)):
        if given is not None and given.shape != hidden.shape[:-1]:
            raise ValueError(
                f"{name}{list(given.shape)} for hidden{list(hidden.shape)}: pass one per token, "
                f"{list(hidden.shape[:-1])}"
            )
    if not 0 <= loss.z_loss < math.inf:
        raise ValueError(f"z_loss must be at least 0 and finite, got {loss.z_loss}")
    if loss.soft_cap is not None and not 0 < loss.soft_cap < math.inf:
        raise ValueError(f"soft_cap must be above 0 and finite, got {loss.soft_cap}; None: no cap")
    if loss.chunk_tokens is not None and loss.chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, got {loss.chunk_tokens}")
    check_choice("products", loss.products, PRODUCTS)
    if not loss.in_fp8:
        return
    for name, x in (("hidden", hidden), ("head", head)):
        if x.dtype.name not in FP8_INPUTS:
            raise ValueError(
                f"{name} in {x.dtype} with products={loss.products!r}, which quantizes "
                f"{', '.join(FP8_INPUTS)}: cast it, or leave products out"
            )
    if loss.products == FP8 and loss.precision is not None:
        raise ValueError(
            f"precision={loss.precision!r} with products={loss.products!r}: products of codes have "
            "no precision. Leave it out, or use products='fp8-gradients', whose logits use it"
        )


def _option(name: str, value: object, to: Callable[..., T], kind: str) -> T:
    """Return a static option as a Python number."""
    try:
        if not isinstance(value, bool | str):
            return to(value)
    except TypeError:  # JAX's errors about tracers are TypeErrors
        pass
    given = f"a traced {value}" if isinstance(value, jax.core.Tracer) else repr(value)
    raise TypeError(f"{name} must be {kind} known when tracing, got {given}")


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Shardings of the arrays on a mesh."""

    mesh: Mesh | AbstractMesh  # the mesh whose devices share the work
    tokens: tuple[tuple[str, ...], ...]  # the mesh axes that shard each axis of the labels
    width: tuple[str, ...]  # the mesh axes that shard the head's width
    vocab: tuple[str, ...]  # the mesh axes that shard the head's vocabulary
    manual: frozenset[str]  # the mesh axes over which `shard_map`, not XLA, partitions the work
    explicit: bool  # whether the arrays' types have these shardings
    vocab_axis: int  # the axis of the head that is the vocabulary

    @property
    def batch(self) -> tuple[str, ...]:
        """Return all mesh axes that shard the tokens."""
        return tuple(name for names in self.tokens for name in names)

    @property
    def scattered(self) -> bool:
        """Return whether the head's gradient is reduce-scattered, to one shard per device."""
        return bool(self.width) and set(self.width) <= set(self.batch)

    @property
    def of_tokens(self) -> P:
        return P(*(names or None for names in self.tokens))

    @property
    def of_hidden(self) -> P:
        return P(*self.of_tokens, None)

    def of_head(self, width: tuple[str, ...] = ()) -> P:
        both = (self.vocab or None, width or None)
        return P(*(both if self.vocab_axis == 0 else both[::-1]))

    def place(self, x: jax.Array, spec: P) -> jax.Array:
        """Reshard an array on Explicit axes."""
        sharding = jax.sharding.NamedSharding(self.mesh, spec) if self.explicit else None
        return reshard(x, sharding)


@dataclasses.dataclass(frozen=True)
class _Loss:
    """Static arguments of a loss."""

    vocab_axis: int
    z_loss: float
    soft_cap: float | None
    chunk_tokens: int | None
    products: str
    precision: PrecisionLike
    head_dtype: str
    layout: _Layout | None = None

    @property
    def vocab_axes(self) -> tuple[str, ...]:
        """Return the mesh axes that shard the vocabulary."""
        return self.layout.vocab if self.layout else ()

    @property
    def in_fp8(self) -> bool:
        """Return whether any product runs in FP8."""
        return self.products != INPUT


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Needed:
    """The gradients that are needed; false if there are none."""

    hidden: bool = False
    head: bool = False

    def __bool__(self) -> bool:
        return self.hidden or self.head


def _layout(
    hidden: jax.Array,
    head: jax.Array,
    labels: jax.Array,
    mesh: Mesh | AbstractMesh | None,
    specs: tuple[P, P] | None,
    vocab_axis: int,
) -> _Layout | None:
    typed = False
    if specs is None:
        if mesh is not None:
            raise ValueError("mesh without specs: also pass specs, for hidden and head")
        types = [jax.typeof(x).sharding for x in (hidden, head, labels)]
        meshes = [sharding.mesh for sharding in types if sharding.mesh.explicit_axes]
        if not meshes:
            return None
        mesh, typed = meshes[0], True
        specs = tuple(sharding.spec for sharding in types[:2])
    elif mesh is None:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            raise ValueError("specs without a mesh: pass mesh=, or set one with jax.set_mesh")
    try:
        of_hidden, of_head = (
            tuple(axes_of(spec, x.ndim)) for spec, x in zip(specs, (hidden, head), strict=True)
        )
    except (TypeError, ValueError):
        raise ValueError(f"specs={specs!r}: pass a pair, for hidden and head") from None
    width, vocab = of_head if vocab_axis else of_head[::-1]
    manual = frozenset(mesh.explicit_axes if typed else mesh.axis_names)
    layout = _Layout(mesh, of_hidden[:-1], width, vocab, manual, typed, vocab_axis)
    both = sorted(set(layout.batch) & set(vocab))
    if both:
        raise ValueError(
            f"tokens and the vocabulary are both sharded over {', '.join(both)}: each device would "
            "need logits of others. Shard one of them over another axis."
        )
    return layout


# ---- rules of differentiation --------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _losses(loss: _Loss, hidden: jax.Array, head: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the loss of each token."""
    return _sweep(loss, _Needed(), hidden, head, labels, None)[0]


def _losses_forward(
    loss: _Loss, hidden: Primal, head: Primal, labels: Primal
) -> tuple[jax.Array, PyTree]:
    given = hidden.value, head.value, labels.value
    return _losses(loss, *given), (_Needed(hidden.perturbed, head.perturbed), *given)


def _losses_backward(loss: _Loss, saved: PyTree, g: PyTree) -> tuple[PyTree, ...]:
    needed, hidden, head, labels = saved
    if isinstance(g, SymbolicZero) or not needed:
        return None, None, None
    _, of_hidden, of_head = _sweep(loss, needed, hidden, head, labels, g)
    return of_hidden, None if of_head is None else of_head.astype(head.dtype), None


_losses.defvjp(_losses_forward, _losses_backward, symbolic_zeros=True)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss_sum(
    loss: _Loss, hidden: jax.Array, head: jax.Array, labels: jax.Array, weights: jax.Array | None
) -> jax.Array:
    """Return the weighted sum of the losses; its forward pass computes the gradients too."""
    losses = _sweep(loss, _Needed(), hidden, head, labels, None)[0]
    return losses.sum() if weights is None else (_without_masked(losses, weights) * weights).sum()


def _sum_forward(
    loss: _Loss, hidden: Primal, head: Primal, labels: Primal, weights: Primal | None
) -> tuple[jax.Array, PyTree]:
    needed = _Needed(hidden.perturbed, head.perturbed)
    given = hidden.value, head.value, labels.value
    if weights is None:
        losses, *gradients = _sweep(loss, needed, *given, None)
        return losses.sum(), (*gradients, None)
    losses, *gradients = _sweep(loss, needed, *given, weights.value)
    losses = _without_masked(losses, weights.value)
    return (losses * weights.value).sum(), (*gradients, losses if weights.perturbed else None)


def _sum_backward(loss: _Loss, saved: PyTree, g: PyTree) -> tuple[PyTree, ...]:
    """Multiply the gradients that the forward pass computed by the scalar `g`."""
    if isinstance(g, SymbolicZero):
        return None, None, None, None
    of_hidden, of_head, of_weights = saved  # the last are the losses
    if of_hidden is not None:
        of_hidden = (of_hidden * g).astype(of_hidden.dtype)
    if of_head is not None:
        of_head = (of_head * g).astype(loss.head_dtype)  # it was summed in f32
    if of_weights is not None:
        of_weights = of_weights * g
    return of_hidden, of_head, None, of_weights


_loss_sum.defvjp(_sum_forward, _sum_backward, symbolic_zeros=True)


def _without_masked(losses: jax.Array, weights: jax.Array) -> jax.Array:
    """Set losses that are not finite to 0 if their weight is 0."""
    return jnp.where((weights == 0) & ~jnp.isfinite(losses), 0, losses)


Gradients = tuple[jax.Array, jax.Array | None, jax.Array | None]


def _sweep(loss: _Loss, needed: _Needed, *given: PyTree) -> Gradients:
    """Return losses per token, and the gradients of their sum, weighted by `scale` [...] (None: 1).

    The gradient of hidden is in its dtype, the head's in f32. `given`: see `_sweep_device`.
    """
    return (_sweep_once if loss.in_fp8 else _sweep_devices)(loss, needed, *given)


def _sweep_devices(loss: _Loss, needed: _Needed, *given: PyTree) -> Gradients:
    """Return `_sweep` from one device, or from those of the mesh."""
    layout = loss.layout
    if layout is None:
        return _sweep_device(loss, needed, *given)
    hidden, head, labels, scale = given
    of_tokens, of_hidden, of_head = layout.of_tokens, layout.of_hidden, layout.of_head()
    result = layout.of_head(layout.width if layout.scattered else ())
    losses, for_hidden, for_head = jax.shard_map(
        partial(_sweep_shard, loss, needed),
        mesh=layout.mesh,
        in_specs=(of_hidden, of_head, of_tokens, None if scale is None else of_tokens),
        out_specs=(
            of_tokens, of_hidden if needed.hidden else None, result if needed.head else None
        ),
        axis_names=layout.manual,
    )(hidden, layout.place(head, of_head), labels, scale)  # fmt: skip
    if for_head is not None:
        for_head = layout.place(for_head, layout.of_head(layout.width))
    return losses, for_hidden, for_head


def _refuse_derivative(loss: _Loss, *more: PyTree) -> PyTree:
    raise TypeError(
        f"the gradients of linear_cross_entropy with products={loss.products!r} have no "
        "derivative: rounding has none. For second derivatives use products='input'"
    )


_sweep_once = numerics.first_order_only(_sweep_devices, static=2, refuse=_refuse_derivative)


def _sweep_shard(loss: _Loss, needed: _Needed, *given: PyTree) -> Gradients:
    """Process one device's tokens and sum the head's gradient over the devices of the batch."""
    losses, of_hidden, of_head = _sweep_device(loss, needed, *given)
    layout = loss.layout
    assert layout is not None
    if of_head is not None:
        scattered = layout.width if layout.scattered else ()
        others = tuple(name for name in layout.batch if name not in scattered)
        if others:
            of_head = lax.psum(of_head, others)
        if scattered:
            axis = 1 - loss.vocab_axis
            of_head = lax.psum_scatter(of_head, scattered, scatter_dimension=axis, tiled=True)
    return losses, of_hidden, of_head


def _sweep_device(
    loss: _Loss,
    needed: _Needed,
    hidden: jax.Array,
    head: jax.Array,
    labels: jax.Array,
    scale: jax.Array | None,
) -> Gradients:
    """Process all chunks, one after the other."""
    lead = labels.shape
    limit = loss.chunk_tokens or chunk_limit(head.shape[loss.vocab_axis])
    if not lead or math.prod(lead[:-1]) > limit:  # one token of each row exceeds the limit
        flat = (hidden.reshape(-1, hidden.shape[-1]), head, labels.reshape(-1))
        flat_scale = None if scale is None else scale.reshape(-1)
        losses, of_hidden, of_head = _sweep_device(loss, needed, *flat, flat_scale)
        of_hidden = None if of_hidden is None else of_hidden.reshape(hidden.shape)
        return losses.reshape(lead), of_hidden, of_head
    codes = None
    if loss.in_fp8:
        uses = (loss.products == FP8, needed.hidden)
        codes = quantize_head(head, loss.vocab_axis, loss.vocab_axes, *uses)
    transposed = loss.in_fp8 and loss.vocab_axis == 1  # the head's gradient of a chunk
    # cut the last axis of tokens, so that each device of a mesh has rows of every chunk
    number, length = chunks(lead, limit)
    if number == 1:
        losses, of_hidden, of_head = _chunk(loss, needed, hidden, head, codes, labels, scale)
        return losses, of_hidden, of_head.T if of_head is not None and transposed else of_head
    if number * length > lead[-1] and needed and scale is None:
        scale = jnp.ones(lead, jnp.float32)  # `_cut` pads it with 0
    axis = labels.ndim - 1
    given = [None if x is None else _cut(x, axis, number, length) for x in (hidden, labels, scale)]

    def add_chunk(head_total: PyTree, chunk: tuple[PyTree, ...]) -> tuple[PyTree, PyTree]:
        """Add a chunk's gradient of the head, if needed; stack its losses and other gradient."""
        chunk_hidden, chunk_labels, chunk_scale = chunk
        losses, of_hidden, of_head = _chunk(
            loss, needed, chunk_hidden, head, codes, chunk_labels, chunk_scale
        )
        return None if of_head is None else head_total + of_head, (losses, of_hidden)

    head_zeros = None
    if needed.head:
        # one zero that depends on hidden: XLA makes equal constants once, so zeros for the gradient
        # of a tied embedding's lookup would exist from here to the end of the backward pass (no
        # upstream issue known)
        zero = jnp.zeros((), f32_or_more(hidden, head))
        zero = varying.over(zero, varying.axes_of(hidden, head, labels, scale))
        zero = varying.after(zero, hidden)
        head_zeros = jnp.broadcast_to(zero, head.shape[::-1] if transposed else head.shape)
    of_head, (losses, of_hidden) = lax.scan(add_chunk, head_zeros, tuple(given))
    if of_hidden is not None:
        of_hidden = _joined(of_hidden, axis, lead[-1])
    of_head = of_head.T if of_head is not None and transposed else of_head
    return _joined(losses, axis, lead[-1]), of_hidden, of_head


def chunk_limit(vocab: int) -> int:
    """Return the maximum number of tokens per chunk."""
    return max(1, _CHUNK_LOGITS // max(1, vocab))


def chunks(lead: tuple[int, ...], limit: int) -> tuple[int, int]:
    """Return the number of chunks of tokens [*lead], cut on the last axis, and their length there.

    A chunk has at most `limit` tokens, if prod(lead[:-1]) <= limit. Up to twice as many chunks are
    taken if they are equal then; otherwise the last one is padded.
    """
    length = lead[-1]
    least = max(1, min(length, math.ceil(math.prod(lead) / limit)))
    numbers = range(least, min(2 * least, length) + 1)
    number = next((n for n in numbers if length % n == 0), least)
    return number, math.ceil(length / number)


def _cut(x: jax.Array, axis: int, number: int, length: int) -> jax.Array:
    """Cut an axis into chunks [number, ..., length, ...], the last padded with zeros."""
    missing = number * length - x.shape[axis]
    if missing:
        x = jnp.pad(x, [(0, missing if d == axis else 0) for d in range(x.ndim)])
    x = x.reshape(*x.shape[:axis], number, length, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def _joined(x: jax.Array, axis: int, length: int) -> jax.Array:
    """Undo `_cut`."""
    x = jnp.moveaxis(x, 0, axis)
    x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
    return lax.slice_in_dim(x, 0, length, axis=axis)


def _chunk(
    loss: _Loss,
    needed: _Needed,
    hidden: jax.Array,
    head: jax.Array,
    codes: HeadCodes | None,
    labels: jax.Array,
    scale: jax.Array | None,
) -> Gradients:
    """Compute the logits of one chunk, its losses and gradients."""
    kind = InInputs if codes is None else InFp8
    products = kind(hidden, head, loss.vocab_axis, loss.precision, codes)
    logits = products.logits()
    if loss.soft_cap is not None:
        logits = loss.soft_cap * jnp.tanh(logits / loss.soft_cap)
    names, size = loss.vocab_axes, head.shape[loss.vocab_axis]
    first = lax.axis_index(names) * size if names else 0
    everything = size * (lax.axis_size(names) if names else 1)
    is_label = lax.broadcasted_iota(jnp.int32, (1,) * labels.ndim + (size,), labels.ndim)
    is_label = is_label == (labels.astype(jnp.int32) - first)[..., None]

    def over_vocab(x: jax.Array) -> jax.Array:
        return lax.psum(x, names) if names else x

    highest = lax.stop_gradient(logits.max(-1))
    if names:
        highest = lax.pmax(highest, names)
    highest = jnp.where(jnp.isfinite(highest), highest, 0)
    sums = over_vocab(jnp.exp(logits - highest[..., None]).sum(-1))
    log_sum = jnp.log(sums) + highest
    of_label = over_vocab(jnp.where(is_label, logits, 0).sum(-1))
    is_token = (labels >= 0) & (labels < everything)
    losses = log_sum - of_label
    if loss.z_loss:
        losses += loss.z_loss * jnp.square(log_sum)
    losses = jnp.where(is_token, losses, jnp.nan)
    if not needed:
        return losses, None, None

    gradient = jnp.exp(logits - log_sum[..., None])
    if loss.z_loss:
        gradient *= 1 + (2 * loss.z_loss) * log_sum[..., None]
    gradient -= is_label
    if loss.soft_cap is not None:
        gradient *= 1 - jnp.square(logits / loss.soft_cap)
    times = jnp.ones_like(losses) if scale is None else scale.astype(products.wide)
    times = jnp.where(is_token | (times == 0), times, jnp.nan)[..., None]
    g = products.operand(jnp.where(times == 0, 0, gradient * times))
    for_hidden = for_head = None
    if needed.hidden:
        for_hidden = over_vocab(products.for_hidden(g)).astype(hidden.dtype)
    if needed.head:
        for_head = products.for_head(g, None if scale is None else scale == 0)
    return losses, for_hidden, for_head
