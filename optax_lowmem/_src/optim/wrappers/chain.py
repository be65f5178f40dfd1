"""`chain` with f32 gradients between links, and `step`."""

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optax_lowmem._src.arrays import numerics, trees
from optax_lowmem._src.arrays.compiled import compiled
from optax_lowmem._src.arrays.hyperparameters import check_choice
from optax_lowmem._src.arrays.sharding import named_shardings
from optax_lowmem._src.arrays.typing import PyTree, Tree
from optax_lowmem._src.kernels import step_arguments
from optax_lowmem._src.optim.step import IMPLEMENTATIONS
from optax_lowmem._src.optim.step.engine import EngineTransformation
from optax_lowmem._src.optim.step.masters import adds_noise, splits_masters


def chain(*transformations: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Chain transformations as `optax.chain`, with the same state, but pass gradients in f32.

    (optax's clipping computes the norm of bf16 gradients in bf16.) If the last link is one of our
    optimizers with `update_dtype="gradient"`, it gets the gradients in their original dtype.

    Args:
      *transformations: the links; one that splits master weights, or adds noise to weights, must
        be the last.

    Raises:
      TypeError: for a link that is not a transformation.
      ValueError: without links; in `init`, if a link follows one that splits master weights or adds
        noise.

    Example:
      >>> import optax, optax_lowmem as lowmem
      >>> tx = lowmem.chain(optax.clip_by_global_norm(1.0), lowmem.flash_adamw(3e-4))
    """
    for link in transformations:
        trees.check_transformation(link, "chain takes transformations one by one, chain(*links).")
    if not transformations:
        raise ValueError("chain takes at least one transformation: chain(*links).")
    linked = optax.chain(*transformations)

    def init(params: optax.Params) -> optax.OptState:
        for index, link in enumerate(transformations[:-1]):
            if adds_noise(link, params):
                raise ValueError(
                    f"link {index} of the chain adds noise to weights, and link {index + 1} would "
                    "change its updates: put gaussws_noise around the chain, or last in the chain."
                )
            if splits_masters(link, params):
                raise ValueError(
                    f"link {index} of the chain splits master weights, so link {index + 1} would "
                    "change updates after their corrections were computed. Put it before, or give "
                    f"link {index} storage=Storage(master_weight_bits=None) and wrap the chain in "
                    "split_master_weights."
                )
        return linked.init(params)

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        return _run_links(transformations, updates, state, params, _update, extra)

    update.links = transformations  # type: ignore[attr-defined]
    return Chain(init, update)


class Chain(optax.GradientTransformationExtraArgs):  # type: ignore[misc]  # optax has no types
    """A chain that stores its links for `step`, on its function: tree functions keep these."""

    @property
    def links(self) -> tuple[optax.GradientTransformation, ...]:
        links: tuple[optax.GradientTransformation, ...] = self.update.links
        return links


Take = Callable[
    [PyTree, PyTree, PyTree], tuple[PyTree, PyTree]
]  # (gradients, state, weights) -> new ones


class InnerWeights(Protocol):
    """The functions of a `WeightTransformation`."""

    @property
    def inner(self) -> optax.GradientTransformationExtraArgs: ...

    def update(
        self,
        updates: PyTree,
        state: PyTree,
        params: PyTree = None,
        *,
        factor: jax.Array | None = None,
        **extra: Any,
    ) -> tuple[PyTree, PyTree]:
        """As optax's; `factor` multiplies the gradients, if `inner` is one of our optimizers."""

    def advance(
        self, gradients: PyTree, state: PyTree, params: PyTree, take: Take, factor: jax.Array | None
    ) -> tuple[PyTree, PyTree]:
        """Return new parameters and state.

        `take(gradients, inner state, inner weights)` steps the weights of `inner`, with `factor`
        applied. `factor` is for what is stepped beside them, such as bitwidths.
        """


class WeightTransformation(optax.GradientTransformationExtraArgs):  # type: ignore[misc]
    """A transformation whose optimizer steps other weights than the loss gets: `gaussws_noise`."""

    work: InnerWeights


def step(
    tx: optax.GradientTransformation,
    grads: optax.Updates,
    state: optax.OptState,
    params: optax.Params,
    *,
    implementation: str | None = None,
    mesh: jax.sharding.Mesh | None = None,
    specs: object = None,
    **extra: Any,
) -> tuple[optax.Params, optax.OptState]:
    """Take one training step; return new parameters and state.

    Gives the same result as `tx.update` and `optax.apply_updates`. Nothing is donated here: jit the
    training step with `donate_argnums` for parameters and state. If a wrapper of optax rejects f32
    updates of 16-bit gradients, the step is traced again with these gradients in f32.

    Args:
      tx: any optax transformation.
      grads: gradients, f32 or 16-bit.
      state: the optimizer's state. Arrays in host memory, as in `jax.device_put(state,
        SingleDeviceSharding(device, memory_kind="pinned_host"))`, are copied to the device one
        parameter at a time, and back; outside of jit only.
      params: the parameters.
      implementation: None selects the fastest available for each leaf (see `explain`); "xla" is
        plain jnp on every device; "pallas" and "triton" are GPU kernels. "pallas_tpu" is a TPU
        kernel, which no TPU has run: only this argument selects it, and leaves that it does not
        support are XLA's. The mesh of the arrays, `jax.set_mesh` or `jax.default_device` determines
        whether the program is for a TPU, on any machine; without them, on a machine with a TPU,
        the choice is made by the platform for which the program is compiled.
      mesh: mesh of `specs`; by default that of `jax.set_mesh`.
      specs: on a mesh with Auto axes, the sharding of codes and corrections: a tree like the
        parameters of PartitionSpec or NamedSharding (under ZeRO-1, of `state_shardings(...).mu`).
        Kernels then run on each device's shard. On GPUs they do without `specs` too, and on
        Explicit axes; on TPUs with Auto axes and no `specs`, XLA compiles the step.
      **extra: extra arguments of the optimizer, such as `value=`.

    Returns:
      (parameters, state).

    Raises:
      ValueError: for an implementation that does not support a leaf, or "pallas_tpu" in a program
        that is not for a TPU; names leaf and reason.
      TypeError: for a wrapper of optax that needs updates in the gradients' dtype; a note explains
        which option gives them.

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> tx = lowmem.flash_adamw(1e-3)
      >>> params, state = lowmem.init(tx, {"w": jnp.ones((8, 8))})
      >>> params, state = lowmem.step(tx, {"w": jnp.ones((8, 8))}, state, params)
    """
    trees.check_transformation(tx, "pass step(tx, grads, state, params).")
    check_choice("implementation", implementation, (*IMPLEMENTATIONS, None))
    places = None if specs is None else named_shardings(params, specs, mesh)
    with step_arguments.stepping(implementation=implementation, shardings=places):
        try:
            return _step_by_params(tx, grads, state, params, None, extra)
        except TypeError as error:
            if not _may_select(tx) or not _any_narrow((grads, params)):
                raise
            failed = error
        # With f32 gradients, zeros like the gradients match the f32 updates. JAX and optax raise a
        # plain TypeError if they do not: https://github.com/google-deepmind/optax/issues/377
        if _any_narrow(grads):
            with contextlib.suppress(TypeError):
                return _step_by_params(tx, _widened(grads), state, params, None, extra)
        failed.add_note(_UNLIKE_BRANCHES)
        raise failed


def _run_links(
    links: Sequence[optax.GradientTransformation],
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params,
    last: Callable[..., tuple[optax.Updates, optax.OptState]],
    extra: Mapping[str, object],
) -> tuple[optax.Updates, optax.OptState]:
    """Run the links before the last on f32 gradients, then apply `last` to the last link.

    Clipping by the global norm right before one of our optimizers becomes a factor by which the
    optimizer multiplies the gradient, which avoids a scaled f32 copy.
    """
    *before, final = links
    if not isinstance(state, (tuple, list)) or len(state) != len(links):
        parts = f" of {len(state)}" if isinstance(state, (tuple, list)) else ""
        raise ValueError(
            f"the state is a {type(state).__name__}{parts}, but the state of this chain is a tuple "
            f"with a state for each of its {len(links)} links. The arguments are step(tx, grads, "
            "state, params) and update(grads, state, params)."
        )
    gradients = updates
    limit = global_norm_limit(before[-1]) if before and _takes_factor(final) else None
    run = before if limit is None else before[:-1]
    if run or not _takes_factor(final):
        updates = _widened(updates)
    states = []
    for link, link_state in zip(run, state, strict=False):
        update = optax.with_extra_args_support(link).update
        updates, new = update(updates, link_state, params, **extra)
        states.append(trees.keep_dtypes(link_state, new, gradients))
    factor = None
    if limit is not None:
        norm = compiled(norm_of)(jax.tree.leaves(updates))
        factor = clipping_factor(limit, norm)
        states.append(state[-2])
    if _follows_gradients(final):
        updates = trees.as_given(updates, gradients)
    result, new = last(final, updates, state[-1], params, factor, extra)
    return result, (*states, trees.keep_dtypes(state[-1], new, gradients))


def _update(
    tx: optax.GradientTransformation,
    updates: PyTree,
    state: PyTree,
    params: PyTree,
    factor: jax.Array | None,
    extra: Mapping[str, object],
) -> tuple[optax.Updates, optax.OptState]:
    if isinstance(tx, EngineTransformation):
        return tx.engine.update(updates, state, params, gradient_scale=factor)
    if isinstance(tx, WeightTransformation):
        return tx.work.update(updates, state, params, factor=factor, **extra)
    return optax.with_extra_args_support(tx).update(updates, state, params, **extra)


def _step_by_params(
    tx: optax.GradientTransformation,
    updates: PyTree,
    state: PyTree,
    params: PyTree,
    factor: jax.Array | None,
    extra: Mapping[str, object],
) -> tuple[optax.Params, optax.OptState]:
    """Step a transformation, or the links of a chain, by new parameters where it returns them."""
    if isinstance(tx, Chain):
        return _run_links(tx.links, updates, state, params, _step_by_params, extra)
    if isinstance(tx, EngineTransformation) and tx.engine.weights and params is not None:
        return tx.engine.run(updates, state, params, gradient_scale=factor, returns_params=True)
    if isinstance(tx, WeightTransformation):

        def take(gradients: PyTree, inner_state: PyTree, weights: PyTree) -> tuple[PyTree, PyTree]:
            return _step_by_params(tx.work.inner, gradients, inner_state, weights, factor, extra)

        return tx.work.advance(updates, state, params, take, factor)
    updates, state = _update(tx, updates, state, params, factor, extra)
    return optax.apply_updates(params, updates), state


_UNLIKE_BRANCHES = (
    "If a wrapper such as optax.apply_if_finite, conditionally_mask or MultiSteps selects between "
    "an update and zeros like the gradient, their dtypes must be equal: build the optimizer with "
    "storage=Storage(update_dtype='gradient') (also an argument of split_master_weights)."
)


def _may_select(tx: optax.GradientTransformation) -> bool:
    """Return whether a wrapper may select between updates and zeros like the gradients."""
    return _may_select(tx.links[-1]) if isinstance(tx, Chain) else not _takes_factor(tx)


def _any_narrow(tree: Tree) -> bool:
    return any(numerics.is_narrow(jnp.result_type(x)) for x in jax.tree.leaves(tree))


def _takes_factor(tx: optax.GradientTransformation) -> bool:
    """Return whether a transformation accepts a gradient scale and 16-bit gradients."""
    return isinstance(tx, EngineTransformation) or (
        isinstance(tx, WeightTransformation) and isinstance(tx.work.inner, EngineTransformation)
    )


def _follows_gradients(tx: optax.GradientTransformation) -> bool:
    """Return whether this is one of our optimizers with `update_dtype="gradient"`."""
    tx = tx.work.inner if isinstance(tx, WeightTransformation) else tx
    return isinstance(tx, EngineTransformation) and tx.engine.storage.update_dtype == "gradient"


def _widened(updates: Tree) -> Tree:
    return trees.widened(updates, floats_only=True)


def global_norm_limit(link: optax.GradientTransformation) -> PyTree:
    """Return the limit of `optax.clip_by_global_norm`, or None for any other link."""
    # optax's transformations are closures that cannot be asked what they are. Two of one
    # constructor share their code: https://github.com/google-deepmind/optax/issues/1
    if getattr(link.update, "__code__", None) is not _CLIPPING.update.__code__:
        return None
    return inspect.getclosurevars(link.update).nonlocals.get("max_norm")


_CLIPPING = optax.clip_by_global_norm(1.0)


def norm_of(gradients: list[jax.Array]) -> jax.Array:
    """Return the global norm of gradients, computed in f32."""
    return jnp.asarray(optax.tree.norm(_widened(gradients)))


@compiled
def clipping_factor(limit: ArrayLike, norm: jax.Array) -> jax.Array:
    """Return the factor by which `optax.clip_by_global_norm(limit)` scales gradients."""
    # a norm of 0 may come from tiny gradients whose squares underflow; optax does not change them
    factor = jnp.where(norm < limit, 1, limit / norm)
    # for an infinite norm, as in optax, finite gradients become 0 and infinite ones NaN
    infinite = jnp.where(jnp.isnan(norm), norm, 0)
    return jnp.where(jnp.isfinite(norm), factor, infinite).astype(jnp.float32)
