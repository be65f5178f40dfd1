"""Gradient accumulation that does not cost four bytes per parameter."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import ArrayLike

from optax_lowmem._src.core import context, explicit, numerics, random, trees, varying
from optax_lowmem._src.core.typing import Tree
from optax_lowmem._src.step.engine import Engine, EngineTransformation
from optax_lowmem._src.step.rule import UpdateRule

_BOOL = jax.ShapeDtypeStruct((), jnp.bool_)


class AccumulationState(NamedTuple):
    """The mean so far of a batch's gradients, and the inner state."""

    micro_step: jax.Array  # shape=(), dtype=jnp.int32; 0 ... every - 1
    count: jax.Array  # type: ignore[assignment]  # shape=(), dtype=jnp.int32; micro-batches seen
    seed: jax.Array  # shape=(), dtype=jnp.uint32
    accumulated: Any  # bf16, of the parameters' shapes; None where the moments take the gradients
    inner_state: optax.OptState


def accumulate_gradients(
    tx: optax.GradientTransformation, every: int, into: str = "bfloat16", *, seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    r"""Steps once every `every` micro-batches, on the mean of their gradients.

    Into `bfloat16`: the mean is kept in bf16 with stochastic rounding, a += g / k, so that small
    gradients are not lost; 2 bytes per parameter (`optax.MultiSteps`: 4 in f32). Any `tx`.

    Into `moments`: no buffer at all; every micro-batch goes straight into the optimizer's moments
    and weights move with the last one. Exact up to the codecs for `flash_sgd` without Nesterov
    (m = mu m + sum g_i / k). For `flash_adam` and `flash_adamw` the second moment takes the sum of
    squares, (1-b2) sum (g_i / k)^2, instead of the square of the sum: Adam Accumulation (Zhang et
    al., 2023), the same in expectation where noise dominates the gradient, and steps up to sqrt(k)
    times larger where it does not.

    A clipping belongs inside, `accumulate_gradients(chain(clip, tx), k)`, where it clips the mean:
    before it, in a chain, it clips each micro-batch.

    Args:
      tx: the optimizer; for `moments` one of `flash_sgd`, `flash_adam`, `flash_adamw` themselves,
        or one with Adam's moments in another form: `coat_adamw`, `q_adamw`, `adam_mini` and its
        kin, `flash_factored_adamw`.
      every: micro-batches in a step.
      into: `bfloat16`, which takes any optimizer and only rounds, or `moments`, which changes Adam.
      seed: of the stochastic rounding.

    Returns:
      An optax transformation whose updates are zero between steps.

    Raises:
      ValueError: for an unknown choice, or a rule that needs the whole gradient at once.

    Example:
      >>> import optax_lowmem as lowmem
      >>> tx = lowmem.accumulate_gradients(lowmem.flash_adamw(3e-4), every=8, into="bfloat16")
    """
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"every is a number of micro-batches, at least 1, got {every!r}")
    if into == "bfloat16":
        work = _Buffered(trees.wrapped(tx), every, seed)
        return optax.GradientTransformationExtraArgs(work.init, work.update)
    if into != "moments":
        raise ValueError(f"into must be 'bfloat16' or 'moments', got {into!r}")
    if not isinstance(tx, EngineTransformation) or not tx.engine.weights:
        raise ValueError(
            "into='moments' takes flash_sgd, flash_adam or flash_adamw itself: what stands around "
            "it (a chain, a mask), or follows a bare scale_by_*, would see micro-batches as steps. "
            "Use into='bfloat16'."
        )
    direct = _Direct(tx.engine, every)
    return optax.GradientTransformationExtraArgs(direct.init, direct.update)


@dataclasses.dataclass(frozen=True, eq=False)
class _Buffered:
    inner: optax.GradientTransformationExtraArgs
    every: int
    seed: int

    def init(self, params: optax.Params) -> AccumulationState:
        for path, leaf in trees.named_leaves(params):
            trees.check_param(path, leaf)
        seed = context.provided_seed(self.seed)
        buffer = jax.tree.map(lambda p: jnp.zeros_like(p, dtype=jnp.bfloat16), params)
        micro_step, count = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
        return AccumulationState(micro_step, count, seed, buffer, self.inner.init(params))

    def update(
        self,
        updates: optax.Updates,
        state: AccumulationState,
        params: optax.Params | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, AccumulationState]:
        trees.check_state(state, AccumulationState)
        trees.match("gradient", updates, state.accumulated)
        means = _means(updates, state.accumulated, self.every)

        def step() -> tuple[optax.Updates, optax.OptState, optax.Updates]:
            new, inner = self.inner.update(means, state.inner_state, params, **extra)
            inner = trees.keep_dtypes(state.inner_state, inner)
            empty = jax.tree.map(jnp.zeros_like, state.accumulated)
            return new, inner, explicit.laid_like(empty, state.accumulated)

        def wait() -> tuple[optax.Updates, optax.OptState, optax.Updates]:
            shapes = jax.eval_shape(step)[0]
            nothing = jax.tree.map(
                lambda s: varying.over(jnp.zeros(s.shape, s.dtype), varying.axes_of(s)), shapes
            )
            nothing = explicit.laid_like(nothing, shapes)
            return nothing, state.inner_state, _rounded(means, state.seed, state.count)

        last, micro_step, count = _counted(state.micro_step, state.count, self.every)
        new, inner, buffer = lax.cond(last, step, wait)
        return new, AccumulationState(micro_step, count, state.seed, buffer, inner)


@dataclasses.dataclass(frozen=True, eq=False)
class _Direct:
    engine: Engine
    every: int

    def init(self, params: optax.Params) -> AccumulationState:
        inner = self.engine.init(params)
        h = self.engine.hyperparameters(inner.count)
        jax.eval_shape(lambda first: self.engine.rule.accumulating(h, first, self.every), _BOOL)
        micro_step, count = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
        seed = jnp.array(inner.seed)  # a copy: one array in two places of a state is not donated
        return AccumulationState(micro_step, count, seed, None, inner)

    def update(
        self,
        updates: optax.Updates,
        state: AccumulationState,
        params: optax.Params | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, AccumulationState]:
        del extra
        trees.check_state(state, AccumulationState)
        given = self.engine.hyperparameters(state.inner_state.count)
        counts = state.micro_step, state.count, state.inner_state.count
        h, micro_step, count, steps = _micro_batch(self.engine.rule, given, self.every, *counts)
        new, inner = self.engine.run(updates, state.inner_state, params, h, count)
        inner = inner._replace(count=steps)
        return new, AccumulationState(micro_step, count, state.seed, None, inner)


def value_and_grad(
    loss: Callable[..., jax.Array],
    micro_batches: int,
    prepare: Callable[[optax.Params], Any] | None = None,
) -> Callable[..., tuple[jax.Array, optax.Updates]]:
    r"""Differentiate a mean loss over a batch that is too large, a micro-batch at a time.

    In place of `jax.value_and_grad(loss)` in a training step, where the loss takes (params, batch)
    and has no auxiliary output: the batch's rows are divided into k micro-batches, and the mean of
    their gradients is added up in bf16 with stochastic rounding, a <- round(a + g_i / k), so that
    E[a] is the mean and small gradients are not lost. The
    optimizer takes one step on the result.

    All the while the weights stay as they are, and so does what the loss makes of them alone. With
    `prepare`, that is q = prepare(params), computed once per step, and

        g_i = d loss(params, batch_i, q) / d params, with q held fixed:

    right where q has no derivative, as codes that a product is computed from, whose gradient goes
    straight to the weights.

    Args:
      loss: (params, batch) -> a scalar, the mean over the rows of the batch; with `prepare`,
        (params, batch, prepared).
      micro_batches: k; 1 is `jax.value_and_grad` itself.
      prepare: params -> a tree of arrays that is the same for all micro-batches, such as
        `layers.fp8_flow.quantized_weights`; None: the loss takes two arguments.

    Returns:
      A function of (params, batch, seed) that returns (loss, gradients), the mean loss in f32 and
      gradients in bf16 (in the parameters' dtypes with k = 1). `batch` is a tree of arrays, whose
      axis 0 has the rows; micro-batch i takes every k-th from row i on, so that a mesh that shares
      the rows shares those of each micro-batch. `seed` of the rounding is an integer, another in
      each step, such as the step.

    Raises:
      ValueError: for a number that is not positive, or rows that it does not divide.
      TypeError: for a `prepare` that is no function, or a `seed` that is no integer.

    Numerics: the sum of k roundings is within k 2^-7 of the largest partial mean, and unbiased.

    Memory: 2 bytes per parameter, beside the gradients of one micro-batch; and what `prepare`
    returns, until the last of them.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import optax_lowmem as lowmem
      >>> loss = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
      >>> of_batch = jax.jit(lowmem.value_and_grad(loss, micro_batches=4))
      >>> value, grads = of_batch({"w": jnp.ones(3)}, jnp.ones((8, 3)), seed=0)
      >>> float(value), grads["w"].dtype
      (9.0, dtype(bfloat16))

      Weights whose products are in FP8 are quantized once for all micro-batches:

      >>> from optax_lowmem.layers import fp8_flow
      >>> def loss(params, batch, codes):
      ...     return jnp.mean(fp8_flow.linear(batch, params["w"], kernel_codes=codes))
      >>> once = lambda params: fp8_flow.quantize_weight(params["w"])
      >>> of_batch = jax.jit(lowmem.value_and_grad(loss, micro_batches=4, prepare=once))
      >>> value, grads = of_batch({"w": jnp.ones((3, 2))}, jnp.ones((8, 3)), seed=0)
      >>> round(float(value), 4), grads["w"].shape
      (3.0, (3, 2))
    """
    if isinstance(micro_batches, bool) or not isinstance(micro_batches, int) or micro_batches < 1:
        raise ValueError(
            f"micro_batches is how many share a batch, at least 1, got {micro_batches!r}"
        )
    if prepare is not None and not callable(prepare):
        raise TypeError(f"prepare is a function of the parameters or None, got {prepare!r}")

    def of_batch(
        params: optax.Params, batch: object, seed: ArrayLike
    ) -> tuple[jax.Array, optax.Updates]:
        more = () if prepare is None else (prepare(lax.stop_gradient(params)),)

        def of_one(params: optax.Params, part: object) -> tuple[jax.Array, optax.Updates]:
            return jax.value_and_grad(loss)(params, part, *more)

        if micro_batches == 1:
            return of_one(params, batch)
        parts = jax.tree.unflatten(
            jax.tree.structure(batch),
            [_parts(path, leaf, micro_batches) for path, leaf in trees.named_leaves(batch)],
        )
        _check_seed(seed)
        # the optimizer's own keys are of (its seed, step) in this place
        own = random.mix(jnp.asarray(seed).astype(jnp.uint32))

        def body(
            carry: tuple[jax.Array, optax.Updates], given: tuple[jax.Array, Any]
        ) -> tuple[tuple[jax.Array, optax.Updates], None]:
            total, mean = carry
            index, part = given
            value, gradient = of_one(params, part)
            means = _means(gradient, mean, micro_batches)
            return (total + value.astype(jnp.float32), _rounded(means, own, index)), None

        value, gradient = jax.eval_shape(of_one, params, jax.tree.map(lambda x: x[0], parts))
        total = varying.over(jnp.zeros((), jnp.float32), varying.axes_of(value))
        mean = jax.tree.map(_empty_mean, params, gradient)
        indices = jnp.arange(micro_batches, dtype=jnp.int32)
        (total, mean), _ = lax.scan(body, (total, mean), (indices, parts))
        return total / micro_batches, mean

    return of_batch


def _check_seed(seed: ArrayLike) -> None:
    """Raises for a seed that is no integer; not for a number that has the value of one."""
    dtype = jax.dtypes.result_type(seed)
    if not jnp.issubdtype(dtype, jnp.integer) or jnp.ndim(seed):
        raise TypeError(
            f"the seed of the rounding is an integer, such as the step's number, and not {dtype}"
            f"{list(jnp.shape(seed))}: it is no key of jax.random"
        )


def _parts(path: str, rows: jax.Array, number: int) -> jax.Array:
    """[number, rows / number, ...]: the i-th has every number-th row, from row i on."""
    if not rows.ndim or rows.shape[0] % number:
        raise ValueError(
            f"batch{f' leaf {path!r}' if path else ''} has shape {rows.shape}: axis 0 must have "
            f"rows that {number} micro-batches divide"
        )
    return jnp.moveaxis(rows.reshape(-1, number, *rows.shape[1:]), 1, 0)


def _empty_mean(param: jax.Array, gradient: jax.ShapeDtypeStruct) -> jax.Array:
    """Zeros that lie where the parameter does, and vary over a mesh as its gradient does."""
    return varying.over(jnp.zeros_like(param, dtype=jnp.bfloat16), varying.axes_of(gradient))


def _means(gradients: optax.Updates, means: Tree, every: int) -> Any:
    """The f32 means so far, like the gradients, of these and the means before."""
    share = jnp.float32(1 / every)
    rows = zip(jax.tree.leaves(gradients), jax.tree.leaves(means), strict=True)
    added = [numerics.widen(a) + share * numerics.widen(g) for g, a in rows]
    return jax.tree.unflatten(jax.tree.structure(gradients), added)


def _counted(
    micro_step: jax.Array, count: jax.Array, every: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return whether this micro-batch is the last, and both counts after it."""
    last = micro_step == every - 1
    return last, jnp.where(last, 0, micro_step + 1), optax.safe_increment(count)


def _micro_batch(
    rule: UpdateRule,
    h: Mapping[str, jax.Array],
    every: int,
    micro_step: jax.Array,
    count: jax.Array,
    steps: jax.Array,
) -> tuple[dict[str, jax.Array], jax.Array, jax.Array, jax.Array]:
    """The hyperparameters of a micro-batch, and what the counts are after it.

    Weights move with the last one only, which alone counts as a step.
    """
    first, last = micro_step == 0, micro_step == every - 1
    own = dict(rule.accumulating(h, first, every))
    own |= {name: jnp.where(last, own[name], 0) for name in ("lr", "decay") if name in own}
    micro_step = jnp.where(last, 0, micro_step + 1)
    steps = jnp.where(last, optax.safe_increment(steps), steps)
    return own, micro_step, optax.safe_increment(count), steps


def _rounded(means: Tree, seed: jax.Array, count: jax.Array) -> Tree:
    leaves = [
        round_stochastically(mean, random.leaf_key(seed, count, path))
        for path, mean in trees.named_leaves(means)
    ]
    return jax.tree.unflatten(jax.tree.structure(means), leaves)


def round_stochastically(x: jax.Array, key: jax.Array) -> jax.Array:
    """bf16 of f32 values, up or down with the probabilities that keep the mean."""
    bits = numerics.to_bits(random.round_bits(x, key, 16)) >> 16
    return lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)
