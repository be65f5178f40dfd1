"""Gradient accumulation at 2 bytes per parameter, or without a buffer."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import ArrayLike

from optax_lowmem._src.arrays import numerics, random, trees, varying
from optax_lowmem._src.arrays.compiled import is_eager
from optax_lowmem._src.arrays.hyperparameters import INJECT, check_choice, check_count
from optax_lowmem._src.arrays.sharding import reshard_like
from optax_lowmem._src.arrays.typing import PyTree, Tree
from optax_lowmem._src.optim import context
from optax_lowmem._src.optim.step.engine import Engine, EngineTransformation

_BOOL = jax.ShapeDtypeStruct((), jnp.bool_)


class AccumulationState(NamedTuple):
    """The running mean of a batch's gradients, and the inner state."""

    micro_step: jax.Array  # shape=(), dtype=jnp.int32; 0 ... every - 1
    count: jax.Array  # type: ignore[assignment]  # shape=(), dtype=jnp.int32; micro-batches seen
    seed: jax.Array  # shape=(), dtype=jnp.uint32
    accumulated: PyTree  # bf16, the parameters' shapes; None with into="moments"
    inner_state: optax.OptState


def accumulate_gradients(
    tx: optax.GradientTransformation, every: int, into: str = "bfloat16", *, seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    r"""Step once every `every` micro-batches, on the mean of their gradients.

    `into="bfloat16"` keeps the mean in bf16 with stochastic rounding, a += g / k, so that small
    gradients are not lost; 2 bytes per parameter (`optax.MultiSteps`: 4 in f32). Works with any
    `tx`.

    `into="moments"` needs no buffer: every micro-batch updates the optimizer's moments, and the
    last one also updates the weights. For `flash_sgd` without Nesterov this is exact up to the
    codecs (m = mu m + sum g_i / k). For `flash_adam` and `flash_adamw` the second moment adds the
    sum of squares, (1-b2) sum (g_i / k)^2, instead of the square of the sum (Adam Accumulation,
    Zhang et al., 2023). Both have the same expectation where noise dominates the gradient;
    elsewhere steps are up to sqrt(k) times larger.

    Put clipping inside, `accumulate_gradients(chain(clip, tx), k)`, to clip the mean. Before
    `accumulate_gradients` in a chain, it clips each micro-batch.

    Args:
      tx: the optimizer. `moments` needs an unwrapped `flash_sgd`, `flash_adam`, `flash_adamw`, or
        an optimizer that stores Adam's moments in another form: `coat_adamw`, `q_adamw`,
        `adam_mini` and its variants, `flash_factored_adamw`.
      every: number of micro-batches per step.
      into: `bfloat16` (any optimizer; only adds rounding) or `moments` (changes Adam).
      seed: seed of the stochastic rounding.

    Returns:
      An optax transformation whose updates are zero between steps.

    Raises:
      ValueError: for an unknown `into`, or `moments` with a rule that needs the whole gradient.

    Example:
      >>> import optax_lowmem as lowmem
      >>> tx = lowmem.accumulate_gradients(lowmem.flash_adamw(3e-4), every=8, into="bfloat16")
    """
    check_count("every", every, 1, "micro-batches", INJECT)
    check_choice("into", into, ("bfloat16", "moments"))
    if into == "bfloat16":
        work = _Buffered(trees.wrapped(tx), every, seed)
        return optax.GradientTransformationExtraArgs(work.init, work.update)
    if not isinstance(tx, EngineTransformation) or not tx.engine.weights:
        raise ValueError(
            "into='moments' needs an unwrapped flash_sgd, flash_adam or flash_adamw: a chain or "
            "mask around it, or links after a bare scale_by_*, would take micro-batches for steps. "
            "Use into='bfloat16'."
        )
    direct = _Direct(tx.engine, every)
    return optax.GradientTransformationExtraArgs(direct.init, direct.update)


@dataclasses.dataclass(frozen=True, eq=False)
class _Buffered:
    """`into="bfloat16"`: a bf16 buffer of the mean, and one step of `inner` with it."""

    inner: optax.GradientTransformationExtraArgs
    every: int
    seed: int

    def init(self, params: optax.Params) -> AccumulationState:
        trees.check_params(params)
        seed = context.provided_seed(self.seed)
        buffer = jax.tree.map(lambda p: jnp.zeros_like(p, dtype=jnp.bfloat16), params)
        # two arrays: one that occurs twice cannot be donated
        micro_step, count = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
        return AccumulationState(micro_step, count, seed, buffer, self.inner.init(params))

    def update(
        self, updates: PyTree, state: AccumulationState, params: PyTree = None, **extra: Any
    ) -> tuple[optax.Updates, AccumulationState]:
        trees.check_state(state, AccumulationState)
        trees.match("gradient", updates, state.accumulated)
        means = _means(updates, state.accumulated, self.every)

        # the same function object in each call, so that `jax.eval_shape` traces it once
        update = functools.partial(self.inner.update, **extra) if extra else self.inner.update

        def step() -> tuple[optax.Updates, optax.OptState, optax.Updates]:
            new, inner = update(means, state.inner_state, params)
            inner = trees.keep_dtypes(state.inner_state, inner)
            empty = jax.tree.map(jnp.zeros_like, state.accumulated)
            return new, inner, reshard_like(empty, state.accumulated)

        def wait() -> tuple[optax.Updates, optax.OptState, optax.Updates]:
            shapes, _ = jax.eval_shape(update, means, state.inner_state, params)
            nothing = jax.tree.map(
                lambda s: varying.over(jnp.zeros(s.shape, s.dtype), varying.axes_of(s)), shapes
            )
            nothing = reshard_like(nothing, shapes)
            return nothing, state.inner_state, _rounded(means, state.seed, state.count)

        last = state.micro_step == self.every - 1
        # outside of jit, `lax.cond` would trace and compile its branches, new functions, in each
        # call: https://github.com/jax-ml/jax/issues/14743
        if is_eager([last]):
            new, inner, buffer = step() if last else wait()
        else:
            new, inner, buffer = lax.cond(last, step, wait)
        micro_step = jnp.where(last, 0, state.micro_step + 1)
        count = optax.safe_increment(state.count)
        return new, AccumulationState(micro_step, count, state.seed, buffer, inner)


@dataclasses.dataclass(frozen=True, eq=False)
class _Direct:
    engine: Engine
    every: int

    def init(self, params: optax.Params) -> AccumulationState:
        inner = self.engine.init(params)
        h = self.engine.hyperparameters(inner.count)
        jax.eval_shape(lambda first: self.engine.rule.accumulating(h, first, self.every), _BOOL)
        # two arrays: one that occurs twice cannot be donated
        micro_step, count = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
        seed = jnp.array(inner.seed)  # a copy: an array that occurs twice cannot be donated
        return AccumulationState(micro_step, count, seed, None, inner)

    def update(
        self, updates: PyTree, state: AccumulationState, params: PyTree = None, **extra: Any
    ) -> tuple[optax.Updates, AccumulationState]:
        trees.check_state(state, AccumulationState)
        steps = state.inner_state.count
        first, last = state.micro_step == 0, state.micro_step == self.every - 1
        of_step = self.engine.hyperparameters(steps)
        h = dict(self.engine.rule.accumulating(of_step, first, self.every))
        # only the last micro-batch changes the weights, and counts as a step
        h |= {name: jnp.where(last, h[name], 0) for name in ("lr", "decay") if name in h}
        micro_step = jnp.where(last, 0, state.micro_step + 1)
        count = optax.safe_increment(state.count)
        new, inner = self.engine.run(updates, state.inner_state, params, h=h, count=count)
        inner = inner._replace(count=jnp.where(last, optax.safe_increment(steps), steps))
        return new, AccumulationState(micro_step, count, state.seed, None, inner)


def value_and_grad(
    loss: Callable[..., jax.Array],
    micro_batches: int,
    prepare: Callable[[optax.Params], PyTree] | None = None,
    *,
    dtype: str = "bfloat16",
) -> Callable[..., tuple[jax.Array, optax.Updates]]:
    r"""Differentiate a mean loss over a large batch, one micro-batch at a time.

    Replaces `jax.value_and_grad(loss)` in a training step, for a loss of (params, batch) without
    auxiliary output. The batch's rows are divided into k micro-batches, and the mean of their
    gradients is accumulated in bf16 with stochastic rounding, a <- round(a + g_i / k), so that
    E[a] is the mean and small gradients are not lost. The optimizer takes one step on the result.

    The weights are the same for all micro-batches, and so is anything computed from them alone.
    With `prepare`, q = prepare(params) is computed once per step, and

        g_i = d loss(params, batch_i, q) / d params, with q held fixed.

    This is correct where q has no derivative, such as quantized operands of a product whose
    gradient goes straight to the weights.

    Args:
      loss: (params, batch) -> a scalar, the mean over the rows of the batch; with `prepare`,
        (params, batch, prepared).
      micro_batches: k; with 1 this is `jax.value_and_grad`.
      prepare: params -> a tree of arrays that is the same for all micro-batches, such as
        `layers.fp8_flow.quantized_weights`; None: the loss takes two arguments.
      dtype: `bfloat16`, or `float32` for a sum without rounding, for f32 weights.

    Returns:
      A function of (params, batch, seed) that returns (loss, gradients): the mean loss in f32 and
      gradients in `dtype` (in the parameters' dtypes with k = 1). `batch` is a tree of arrays whose
      axis 0 is the rows. Micro-batch i is every k-th row starting from row i, so that rows sharded
      over a mesh stay sharded in each micro-batch. `seed` of the rounding is an integer that
      differs in every step, such as the step number.

    Raises:
      ValueError: if `micro_batches` is not positive, or does not divide the rows.
      TypeError: for a `prepare` that is not callable, or a `seed` that is not an integer.

    Numerics: the sum of k roundings is within k 2^-7 of the largest partial mean, and unbiased.

    Memory: 2 bytes per parameter (4 with `float32`), beside the gradients of one micro-batch and
    the result of `prepare`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import optax_lowmem as lowmem
      >>> loss = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
      >>> of_batch = jax.jit(lowmem.value_and_grad(loss, micro_batches=4))
      >>> value, grads = of_batch({"w": jnp.ones(3)}, jnp.ones((8, 3)), seed=0)
      >>> float(value), grads["w"].dtype
      (9.0, dtype(bfloat16))

      Quantize the weights of FP8 products once for all micro-batches:

      >>> from optax_lowmem.layers import fp8_flow
      >>> def loss(params, batch, codes):
      ...     return jnp.mean(fp8_flow.linear(batch, params["w"], kernel_codes=codes))
      >>> once = lambda params: fp8_flow.quantize_weight(params["w"])
      >>> of_batch = jax.jit(lowmem.value_and_grad(loss, micro_batches=4, prepare=once))
      >>> value, grads = of_batch({"w": jnp.ones((3, 2))}, jnp.ones((8, 3)), seed=0)
      >>> round(float(value), 4), grads["w"].shape
      (3.0, (3, 2))
    """
    check_count("micro_batches", micro_batches, 1, "micro-batches")
    check_choice("dtype", dtype, ("bfloat16", "float32"))
    of_sum = jnp.dtype(dtype)
    if prepare is not None and not callable(prepare):
        raise TypeError(f"prepare must be a function of the parameters or None, got {prepare!r}")

    def of_batch(params: PyTree, batch: object, seed: ArrayLike) -> tuple[jax.Array, PyTree]:
        more = () if prepare is None else (prepare(lax.stop_gradient(params)),)

        def of_one(params: optax.Params, part: object) -> tuple[jax.Array, optax.Updates]:
            return jax.value_and_grad(loss)(params, part, *more)

        if micro_batches == 1:
            return of_one(params, batch)
        dtype = jax.dtypes.result_type(seed)
        if not jnp.issubdtype(dtype, jnp.integer) or jnp.ndim(seed):
            raise TypeError(
                f"the seed of the rounding must be an integer, such as the step number, got {dtype}"
                f"{list(jnp.shape(seed))}: keys of jax.random are not accepted"
            )
        parts = micro_batches_of(batch, micro_batches)
        # mixed, so that keys differ from the optimizer's, which are hashed from (seed, step)
        mixed_seed = random.mix(jnp.asarray(seed).astype(jnp.uint32))

        def body(carry: PyTree, inputs: PyTree) -> tuple[PyTree, None]:
            total, mean = carry
            index, part = inputs
            value, gradient = of_one(params, part)
            means = _means(gradient, mean, micro_batches)
            if of_sum == jnp.bfloat16:
                means = _rounded(means, mixed_seed, index)
            return (total + value.astype(jnp.float32), means), None

        value, gradient = jax.eval_shape(of_one, params, jax.tree.map(lambda x: x[0], parts))
        total = varying.over(jnp.zeros((), jnp.float32), varying.axes_of(value))
        # with the sharding of the parameters; it varies over the mesh axes of the gradients
        mean = jax.tree.map(
            lambda p, g: varying.over(jnp.zeros_like(p, dtype=of_sum), varying.axes_of(g)),
            params,
            gradient,
        )
        indices = jnp.arange(micro_batches, dtype=jnp.int32)
        (total, mean), _ = lax.scan(body, (total, mean), (indices, parts))
        return total / micro_batches, mean

    return of_batch


def micro_batches_of(batch: object, number: int) -> PyTree:
    """Return a batch with `_parts` of its leaves."""
    parts = [_parts(path, leaf, number) for path, leaf in trees.named_leaves(batch)]
    return jax.tree.unflatten(jax.tree.structure(batch), parts)


def _parts(path: str, rows: jax.Array, number: int) -> jax.Array:
    """Return [number, rows / number, ...], whose entry i has every number-th row from row i."""
    if not rows.ndim or rows.shape[0] % number:
        raise ValueError(
            f"batch{f' leaf {path!r}' if path else ''} has shape {rows.shape}: axis 0 must be "
            f"divisible by {number} micro-batches"
        )
    return jnp.moveaxis(rows.reshape(-1, number, *rows.shape[1:]), 1, 0)


def _means(gradients: optax.Updates, means: Tree, every: int) -> PyTree:
    """Add each gradient's share to its running mean, in f32; return a tree like the gradients."""
    share = jnp.float32(1 / every)
    rows = zip(jax.tree.leaves(gradients), jax.tree.leaves(means), strict=True)
    added = [numerics.widen(a) + share * numerics.widen(g) for g, a in rows]
    return jax.tree.unflatten(jax.tree.structure(gradients), added)


def _rounded(means: Tree, seed: jax.Array, count: jax.Array) -> Tree:
    """Round f32 values to bf16, up or down with probabilities that preserve the mean."""
    leaves = []
    for path, mean in trees.named_leaves(means):
        bits = random.round_bits(mean, random.leaf_key(seed, count, path), 16)
        upper = (numerics.to_bits(bits) >> 16).astype(jnp.uint16)
        leaves.append(lax.bitcast_convert_type(upper, jnp.bfloat16))
    return jax.tree.unflatten(jax.tree.structure(means), leaves)
