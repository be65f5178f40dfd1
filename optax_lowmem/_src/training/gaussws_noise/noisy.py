"""`gaussws_noise`: the loss gets weights plus noise, the state stores the weights without it."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike

from optax_lowmem._src.arrays import array_metadata, numerics, random, trees
from optax_lowmem._src.arrays.compiled import compiled
from optax_lowmem._src.arrays.hyperparameters import as_f32, check_range
from optax_lowmem._src.arrays.roles.parts import Parts, chooser
from optax_lowmem._src.arrays.typing import PyTree
from optax_lowmem._src.kernels import step_arguments
from optax_lowmem._src.layers.noise import distributions, formats, kernels
from optax_lowmem._src.layers.noise.bitwidth import bitwidth
from optax_lowmem._src.layers.noise.sampling import bits_gradient, factor_of, noise_named
from optax_lowmem._src.optim import context
from optax_lowmem._src.optim.step.engine import EngineTransformation
from optax_lowmem._src.optim.step.masters import FIELD, adds_noise, corrections_of
from optax_lowmem._src.optim.wrappers.chain import Take, WeightTransformation

# (path, w, correction, b_i, format, dtype) of a sampled leaf
_Sampled = tuple[str, jax.Array, jax.Array | None, jax.Array, formats.Format, jnp.dtype]


class GaussWSState(NamedTuple):
    """Weights without noise, bitwidths, and the states of the two optimizers."""

    count: jax.Array  # type: ignore[assignment]  # shape=(), dtype=jnp.int32
    seed: jax.Array  # shape=(), dtype=jnp.uint32
    clean: PyTree  # weights of sampled leaves, without noise; 0-d for other leaves
    bits: PyTree  # b_i, f32, per 32 x 32 block; 0-d for other leaves
    scale: PyTree  # max |w| 2^(1 - b_t) of the current noise; 0 before the first noise
    bits_range: jax.Array  # f32 (b_init, b_target)
    bits_state: PyTree
    inner_state: PyTree


class _Leaf(NamedTuple):
    """A leaf before a step; the last three fields are 0-d if it is not sampled."""

    path: str
    sampled: bool
    param: PyTree
    clean: PyTree
    bits: jax.Array
    scale: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class Noisy:
    """Static options of `gaussws_noise`, with its init and update."""

    inner: optax.GradientTransformationExtraArgs
    parts: Parts
    bits_init: float
    bits_target: float
    bits_optimizer: optax.GradientTransformationExtraArgs
    bits_loss: float
    noise: distributions.Noise
    compute: formats.Scaled | None
    clean_dtype: jnp.dtype | None
    seed: int

    def init(self, params: optax.Params) -> GaussWSState:
        """Return the initial state; within `lowmem.init` also pass it the first noisy weights."""
        trees.check_params(params)
        leaves = trees.named_leaves(params)
        chosen = self._chosen(leaves)
        shapes = [
            tuple(kernels.block_shape(leaf.shape)) if sampled else None
            for (_, leaf), sampled in zip(leaves, chosen, strict=True)
        ]
        absent, ones, zeros = compiled(_initial_arrays)(shapes)
        rows = zip(leaves, chosen, absent, strict=True)
        weights = [
            self._initial_clean(path, trees.with_values(leaf)) if sampled else none
            for (path, leaf), sampled, none in rows
        ]
        clean = array_metadata.with_metadata_of(params, weights)
        bits = array_metadata.with_metadata_of(params, ones)
        scale = array_metadata.with_metadata_of(params, zeros)
        with context.recording() as decisions:
            inner = self._init_inner(_merged(params, clean, chosen))
        self._record(decisions, leaves, chosen)
        seed = context.provided_seed(self.seed)
        span = jnp.asarray([self.bits_init, self.bits_target], jnp.float32)
        state = GaussWSState(
            jnp.zeros((), jnp.int32), seed, clean, bits, scale, span,
            self.bits_optimizer.init(bits), inner,
        )  # fmt: skip
        if context.provided_original(leaves[0][0] if leaves else "") is None:
            return state
        return self._first(params, state)

    def _chosen(self, leaves: list[tuple[str, jax.Array]]) -> list[bool]:
        """Return whether each leaf is sampled, and record the decisions."""
        is_chosen = chooser(self.parts)
        chosen = [bool(is_chosen(path, leaf)) for path, leaf in leaves]
        if leaves and not any(chosen):
            names = ", ".join(f"'{path}'" for path, _ in leaves[:6])
            raise ValueError(f"no leaf matches parts={self.parts!r}; the leaves are {names}")
        for (path, leaf), sampled in zip(leaves, chosen, strict=True):
            if sampled:
                kernels.check_matrix(f"sampled leaf '{path}'", leaf)
                words = f"blocks of {kernels.SIDE} x {kernels.SIDE}, initial b_t {self.bits_init:g}"
                context.record(context.Decision(path, FIELD, self.noise.name, words))
        return chosen

    def _initial_clean(self, path: str, leaf: jax.Array) -> jax.Array:
        """Return the clean weight to store, from the f32 original if `lowmem.init` has it."""
        original = context.provided_original(path)
        if self.clean_dtype is None or jnp.dtype(leaf.dtype) == self.clean_dtype:
            # copy, unless the loss gets another array: the parameter's buffer must not be shared
            return jnp.array(leaf, copy=True) if original is None else leaf
        if original is not None and original.shape == leaf.shape:
            return jnp.array(original, self.clean_dtype, copy=True)
        return numerics.widen(leaf)

    def _init_inner(self, weights: optax.Params) -> PyTree:
        if adds_noise(self.inner, weights):
            raise ValueError("gaussws_noise around gaussws_noise: use one, with the parts of both")
        state = self.inner.init(weights)
        for field in ("mini_step", "micro_step"):
            if any(trees.states_with(state, field)):
                raise ValueError(
                    "gradients are accumulated inside gaussws_noise, where each micro-batch would "
                    "get its own noise: put optax.MultiSteps or accumulate_gradients around it."
                )
        return state

    def _record(
        self,
        decisions: list[context.Decision],
        leaves: list[tuple[str, PyTree]],
        chosen: list[bool],
    ) -> None:
        """Record the decisions of `inner`, and which other leaves have a wide clean weight."""
        for decision in decisions:
            context.record(decision)
        decided = {d.path for d in decisions if d.slot == "correction"}
        for (path, leaf), sampled in zip(leaves, chosen, strict=True):
            wide = self.clean_dtype not in (None, jnp.dtype(leaf.dtype))
            if sampled and wide and path not in decided:
                reason = f"its clean weight is in {self.clean_dtype}"
                context.record(context.Decision(path, "correction", None, reason))

    def _first(self, params: optax.Params, state: GaussWSState) -> GaussWSState:
        """Add the noise of step 0: pass noisy weights to `lowmem.init`, return their state."""
        rows = self._leaves(params, state)
        weights = _merged(params, state.clean, [row.sampled for row in rows])
        result = self._sampled(rows, weights, state)
        for row, (weight, _) in zip(rows, result, strict=True):
            if row.sampled:
                context.report_sampled(row.path, weight)
        return state._replace(
            scale=array_metadata.with_metadata_of(params, [s for _, s in result], state.scale)
        )

    def update(
        self, updates: PyTree, state: GaussWSState, params: PyTree = None, *,
        factor: jax.Array | None = None, **extra: object,
    ) -> tuple[PyTree, GaussWSState]:  # fmt: skip
        """Return updates from the old noisy weights to the new ones, and the state.

        `factor`: multiplies the gradients, if `inner` is one of our optimizers.
        """
        emitted: dict[str, jax.Array] = {}
        steps: list[PyTree] = []

        def take(gradients: PyTree, inner_state: PyTree, weights: PyTree) -> tuple[PyTree, PyTree]:
            scaled = {} if factor is None else {"gradient_scale": factor}
            with context.emitting() as inside:
                step, new_state = self.inner.update(
                    gradients, inner_state, weights, **scaled, **extra
                )
            emitted.update(inside)
            steps.append(step)
            return optax.apply_updates(weights, step), new_state

        new, state = self.advance(updates, state, params, take, factor)
        rows = zip(
            trees.named_leaves(params), jax.tree.leaves(new), jax.tree.leaves(steps[0]),
            jax.tree.leaves(state.bits), strict=True,
        )  # fmt: skip
        changes = []
        for (path, old), weight, step, bits in rows:
            change = numerics.widen(weight) - numerics.widen(old) if bits.ndim else step
            changes.append(change)
            if context.current().emitted is not None and (path in emitted or bits.ndim):
                # report changes made after the split inside to an observer outside
                spoilt = emitted[path] - step if path in emitted else jnp.zeros_like(change)
                context.emit(path, change + spoilt)
        return jax.tree.unflatten(jax.tree.structure(params), changes), state

    def advance(
        self,
        gradients: PyTree,
        state: GaussWSState,
        params: PyTree,
        take: Take,
        factor: jax.Array | None,
    ) -> tuple[PyTree, GaussWSState]:
        """Return parameters with new noise, and state; `take` steps the clean weights."""
        if params is None:
            raise ValueError(trees.NO_PARAMS_MSG)
        trees.check_state(state, GaussWSState)
        of_leaves = trees.match("gradient", gradients, params)
        rows = self._leaves(params, state)
        count, bits, bits_state = self._update_bits(rows, of_leaves, state, params, factor)
        chosen = [row.sampled for row in rows]
        given = gradients
        if not isinstance(self.inner, EngineTransformation) and not hasattr(self.inner, "links"):
            # our optimizers and chains accept 16-bit gradients; optax's square them in 16 bits
            gradients = trees.widened(gradients)
        weights, inner = take(gradients, state.inner_state, _merged(params, state.clean, chosen))
        state = state._replace(
            count=count, bits=bits, bits_state=bits_state,
            inner_state=trees.keep_dtypes(state.inner_state, inner, given),
        )  # fmt: skip
        result = self._sampled(rows, weights, state)
        stepped = zip(rows, jax.tree.leaves(weights), strict=True)
        kept = [w if row.sampled else row.clean for row, w in stepped]
        state = state._replace(
            clean=array_metadata.with_metadata_of(params, kept, state.clean),
            scale=array_metadata.with_metadata_of(params, [s for _, s in result], state.scale),
        )
        new = jax.tree.unflatten(jax.tree.structure(params), [w for w, _ in result])
        return new, state

    def _leaves(self, params: optax.Params, state: GaussWSState) -> list[_Leaf]:
        """Pair each parameter with its arrays in the state; raise if these do not fit."""
        leaves = trees.named_leaves(params)
        columns = [jax.tree.leaves(tree) for tree in (state.clean, state.bits, state.scale)]
        if any(len(column) != len(leaves) for column in columns):
            raise ValueError(
                f"the state has {len(columns[0])} leaves for {len(leaves)} parameters: it belongs "
                "to another tree. Call init on these parameters."
            )
        trees.check_state_tree(state.clean, params)
        is_chosen = chooser(self.parts)
        rows = []
        for (path, leaf), *stored in zip(leaves, *columns, strict=True):
            sampled = bool(is_chosen(path, leaf))
            if (stored[0].shape == leaf.shape and leaf.ndim > 0) != sampled:
                raise ValueError(
                    f"'{path}' of shape {leaf.shape} has a clean weight of shape "
                    f"{stored[0].shape}, but parts={self.parts!r} say that it is "
                    f"{'' if sampled else 'not '}sampled: the state was made, or restored, with "
                    "other parts."
                )
            rows.append(_Leaf(path, sampled, leaf, *stored))
        return rows

    def _update_bits(
        self,
        rows: list[_Leaf],
        gradients: PyTree,
        state: GaussWSState,
        params: PyTree,
        factor: PyTree,
    ) -> tuple[jax.Array, PyTree, PyTree]:
        """Return the new count, b_i and state of the bits' optimizer (equations 3, 9 and 10)."""
        run = _bits_gradients if step_arguments.current().shardings else compiled(_bits_gradients)
        rows = [row._replace(param=None, clean=None) for row in rows]  # not needed
        span = self.bits_init, self.bits_target
        of_bits = run(
            self.noise, span, self.bits_loss, rows, gradients, state.seed, state.count, factor
        )
        of_bits = array_metadata.with_metadata_of(params, of_bits, state.bits)
        steps, bits_state = self.bits_optimizer.update(of_bits, state.bits_state, state.bits)
        bits = optax.apply_updates(state.bits, steps)
        return optax.safe_increment(state.count), bits, bits_state

    def _sampled(
        self, rows: list[_Leaf], weights: optax.Params, state: GaussWSState
    ) -> list[tuple[jax.Array, jax.Array]]:
        """Return (weight for the loss, scale of its noise) of each leaf, from clean weights."""
        corrections = corrections_of(weights, state.inner_state)
        leaves = list(zip(rows, jax.tree.leaves(weights), jax.tree.leaves(state.bits), strict=True))
        given = []
        for row, w, b in leaves:
            dtype = jnp.dtype(row.param.dtype)
            to = self.compute or formats.format_of(dtype.name)
            if row.sampled:
                given.append((row.path, w, corrections.get(row.path), b, to, dtype))
        run = _samples if step_arguments.current().shardings else compiled(_samples)
        span = self.bits_init, self.bits_target
        sampled = iter(run(self.noise, span, given, state.seed, state.count))
        return [next(sampled) if row.sampled else (w, row.scale) for row, w, _ in leaves]


def _initial_arrays(
    shapes: list[tuple[int, ...] | None],
) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
    """Return placeholders of clean weights, initial b_i and scales, given block shapes per leaf."""
    ones = [jnp.zeros(()) if shape is None else jnp.ones(shape) for shape in shapes]
    return [jnp.zeros(()) for _ in shapes], ones, [jnp.zeros(shape or ()) for shape in shapes]


def _bits_gradients(
    noise: distributions.Noise,
    span: tuple[float, float],
    bits_loss: ArrayLike,
    rows: list[_Leaf],
    gradients: list[jax.Array],
    seed: jax.Array,
    count: jax.Array,
    factor: jax.Array | None,
) -> list[jax.Array]:
    """Return each leaf's gradient of b_i (equations 3, 9, 10), from those of the sampled weights.

    It is 0 where a leaf is not sampled. `seed` and `count` are those of the sample, so that its
    noise is drawn again. `span` is (b_init, b_target). `factor`, of clipping, scales the gradients
    of the weights' loss, not those of the loss on bits.
    """
    init, target = span
    blocks = sum(row.bits.size for row in rows if row.sampled)
    bits_weight = as_f32("bits_loss", bits_loss) / max(blocks, 1)  # lambda / n of equation 10
    keys = random.leaf_keys(seed, count, [row.path for row in rows])
    results = []
    for row, g, key in zip(rows, gradients, keys, strict=True):
        if not row.sampled:
            results.append(jnp.zeros_like(row.bits))
            continue
        of_bits = bits_gradient(g, row.scale, key, noise, row.path)
        if factor is not None:
            of_bits = of_bits * factor
        excess = bitwidth(row.bits, *span) - target
        of_bits = of_bits + bits_weight * jnp.sign(excess)
        results.append(jnp.float32(init - target) * of_bits)  # d b_t / d b_i, equation 9
    return results


def _samples(
    noise: distributions.Noise,
    span: tuple[float, float],
    rows: list[_Sampled],
    seed: jax.Array,
    count: jax.Array,
) -> list[tuple[jax.Array, jax.Array]]:
    """Return the sampled weights of each row and the scale of their noise."""
    results = []
    keys = random.leaf_keys(seed, count, [path for path, *_ in rows])
    for (path, w, correction, b, to, dtype), key in zip(rows, keys, strict=True):
        factor = factor_of(bitwidth(b, *span))
        results.append(kernels.sample(w, correction, factor, key, noise, to, dtype, path))
    return results


def _merged(params: optax.Params, clean: optax.Params, chosen: list[bool]) -> PyTree:
    """Return the parameters, with clean weights for sampled leaves."""
    rows = zip(jax.tree.leaves(params), jax.tree.leaves(clean), chosen, strict=True)
    weights = [w if sampled else param for param, w, sampled in rows]
    return jax.tree.unflatten(jax.tree.structure(params), weights)


def gaussws_noise(
    inner: optax.GradientTransformation,
    parts: Parts = "all",
    *,
    bits_init: float = 6.0,
    bits_target: float = 4.0,
    bits_optimizer: optax.GradientTransformation | None = None,
    bits_loss: float = 0.0,
    noise: str = "gaussws",
    compute: str | None = None,
    clean_dtype: DTypeLike | None = None,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Train on weights plus noise, \hat w = w + R max|w| 2^{1 - b_t} (GaussWS, equation 1).

    The parameters are \hat w, with new noise after every step. The state stores w, which `inner`
    updates with the gradients of \hat w (equation 2). Each 32 x 32 block has a bitwidth b_t =
    b_{target} + b_i (b_{init} - b_{target}) (equation 9); the gradient of b_i follows equation 3,
    for which R is recomputed. With noise of few bits, weights learn to tolerate low precision,
    without the oscillations of straight-through estimates.

    Put the optimizer, split master weights, clipping and the like inside. Only transformations that
    do not change its updates (`optax.MultiSteps`, `accumulate_gradients`, `track_master_ema`) may
    be around it, or come before it in a chain. Accumulation around it keeps the noise until the
    step.

    Args:
      inner: the whole optimizer.
      parts: the leaves with noise: `od` (an attention's projection and the last matrix of an MLP),
        `qkv`, `out`, `up`, `down`, `all` (every matrix but embeddings and the output head), or a
        glob pattern on paths; several of these; or a function (path, leaf) -> bool. Axes before the
        last two are batch axes.
      bits_init: initial b_t, in bits.
      bits_target: target of b_t.
      bits_optimizer: optimizer of b_i, initially 1; by default
        `optax.adamw(1e-3, weight_decay=0.1)`, whose decay pulls b_t to the target.
        `optax.set_to_zero()` keeps b_t.
      bits_loss: lambda of the loss \lambda mean|b_t - b_{target}| (equation 10), whose gradient is
        added here.
      noise: `gaussws`; `diffq`, U(-0.5, 0.5); `box-muller`, an exact rounded normal.
      compute: narrow format that \hat w is rounded to, as in `gaussws.sample`; None: the
        parameters' dtype.
      clean_dtype: float32 stores w in f32 for 16-bit parameters, for an `inner` that does not
        split master weights; None: the parameters' dtype.
      seed: seed of the noise; `lowmem.init(..., seed=)` overrides it.

    Returns:
      An optax transformation. `lowmem.init` returns parameters with noise; with `tx.init` alone,
      noise starts after the first step. `gaussws.clean_params(params, state)` returns w for
      evaluation, `lowmem.master_params` w in f32, `gaussws.bitwidths(state)` b_t.

    Raises:
      ValueError: if no leaf matches `parts` or a match is no matrix; for accumulation inside.

    Memory: a second weight for sampled leaves, and 16 bytes per block of 1024 (with AdamW for b_i):
    2.02 bytes per 16-bit parameter.

    Numerics: `optax.apply_updates` may change \hat w by 2^-24 of the old value; `lowmem.step`
    returns it exactly. The state has the exact w in both cases.

    Deviation: noise is a hash of (seed, step, path, coordinates) for any sharding, instead of
    generators that seed one another (section 3.7).

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> tx = lowmem.gaussws_noise(lowmem.flash_adamw(1e-3), parts="od")
      >>> params = {"mlp": {name: {"kernel": jnp.ones((64, 64))} for name in ("up", "down")}}
      >>> params, state = lowmem.init(tx, params)
      >>> noisy = {name: bool((w["kernel"] != 1).any()) for name, w in params["mlp"].items()}
      >>> noisy["up"], noisy["down"]
      (False, True)
      >>> params, state = lowmem.step(tx, params, state, params)

    References:
      Gaussian Weight Sampling for Scalable, Efficient and Stable Mixed-Precision QAT, 2025,
      arXiv 2505.11170.
    """
    check_range("bits_loss", bits_loss, 0.0)
    if clean_dtype is not None and jnp.dtype(clean_dtype) != jnp.float32:
        raise ValueError(
            f"clean_dtype must be float32, or None (as the parameters), got {clean_dtype!r}"
        )
    if bits_optimizer is None:
        bits_optimizer = optax.adamw(1e-3, weight_decay=0.1)
    work = Noisy(
        trees.wrapped(inner), parts, _checked_bits("bits_init", bits_init),
        _checked_bits("bits_target", bits_target), trees.wrapped(bits_optimizer), bits_loss,
        noise_named(noise), _scaled_format(compute),
        None if clean_dtype is None else jnp.dtype(clean_dtype), seed,
    )  # fmt: skip
    chooser(parts)
    result = WeightTransformation(work.init, work.update)
    result.work = work
    return result


def _checked_bits(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not -100 < value < 100:
        raise ValueError(f"{name} must be a number of bits known when tracing, got {value!r}")
    return float(value)


def _scaled_format(compute: str | None) -> formats.Scaled | None:
    result = None if compute is None else formats.format_of(compute)
    if result is not None and not isinstance(result, formats.Scaled):
        names = [n for n, f in formats.FORMATS.items() if isinstance(f, formats.Scaled)]
        raise ValueError(
            f"compute={compute!r}: pass one of {', '.join(names)}, or None for the parameters' "
            "dtype."
        )
    return result
