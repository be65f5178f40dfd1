"""Flax's Linen `TrainState` and NNX `Optimizer` with the fused step; only an import changes."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp
import optax

from optax_lowmem._src.arrays import array_metadata, patterns, trees
from optax_lowmem._src.arrays.typing import PyTree
from optax_lowmem._src.optim.step import masters
from optax_lowmem._src.optim.wrappers import chain
from optax_lowmem._src.optim.wrappers.accumulate import accumulate_gradients
from optax_lowmem._src.optim.wrappers.init import WeightDtype, init, splits_of_f32
from optax_lowmem._src.training.release.step import train_step

try:
    from flax import core, nnx
    from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
    from flax.training import train_state
except ModuleNotFoundError as error:
    if error.name is None or error.name.split(".")[0] != "flax":
        raise  # Flax is installed, but one of its dependencies is missing
    raise ImportError("optax_lowmem.flax needs Flax: pip install flax", name="flax") from error

__all__ = ["Optimizer", "TrainState", "substitute"]

M = TypeVar("M")

as_pure = array_metadata.pure
_FLAXS_OPTIMIZER = nnx.Optimizer


def _overwrites(tree: object) -> bool:
    """Return whether a tree has Flax's overwrite-with-gradient collection (FP8)."""
    return isinstance(tree, Mapping) and OVERWRITE_WITH_GRADIENT in tree


def _trained(tree: PyTree) -> PyTree:
    """Return the part of a tree that the optimizer trains."""
    return tree["params"] if _overwrites(tree) else tree


def _start(
    tx: optax.GradientTransformation,
    params: optax.Params,
    dtype: WeightDtype | None,
    keep_f32: Sequence[str],
    allow_rounding: bool,
) -> tuple[PyTree, optax.OptState]:
    """Return weights and state as `lowmem.init`; without a dtype, bf16 where `tx` splits f32."""
    if dtype is not None:
        return init(tx, params, dtype, keep_f32=keep_f32, allow_rounding=allow_rounding)
    split = splits_of_f32(tx, params)
    paths = [path for path, _ in trees.named_leaves(params)]
    split -= patterns.matching("keep_f32", keep_f32, paths)
    if not split:
        return params, tx.init(params)
    return init(tx, params, lambda path, leaf: jnp.bfloat16 if path in split else leaf.dtype)


class TrainState(train_state.TrainState):
    """`flax.training.train_state.TrainState` whose `apply_gradients` is the fused step.

    Fields, `replace`, subclassing and the handling of FP8's overwrite-with-gradient collection are
    those of Flax. The results are bitwise equal to Flax's unless XLA fuses multiply-adds
    differently. This class donates nothing: jit the training step with `donate_argnums` for the
    state.

    Attributes:
      step: number of calls of `apply_gradients`.
      apply_fn: usually `model.apply`.
      params: the weights.
      tx: any optax transformation.
      opt_state: its state.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp, optax_lowmem as lowmem
      >>> from optax_lowmem.flax import TrainState
      >>> model, x = nn.Dense(64), jnp.ones((8, 64))
      >>> state = TrainState.create(
      ...     apply_fn=model.apply,
      ...     params=model.init(jax.random.key(0), x)["params"],
      ...     tx=lowmem.flash_adamw(1e-3),
      ... )
      >>> grads = jax.grad(lambda p: jnp.mean(state.apply_fn({"params": p}, x) ** 2))(state.params)
      >>> state = state.apply_gradients(grads=grads)
      >>> state.step, state.params["kernel"].dtype, state.master_params()["kernel"].dtype
      (1, dtype(bfloat16), dtype('float32'))
    """

    @classmethod
    def create(
        cls,
        *,
        apply_fn: Callable[..., PyTree],
        params: optax.Params,
        tx: optax.GradientTransformation,
        dtype: WeightDtype | None = None,
        keep_f32: Sequence[str] = (),
        allow_rounding: bool = False,
        **kwargs: Any,
    ) -> Self:
        """Create a state at step 0.

        Args:
          apply_fn: usually `model.apply`.
          params: the parameters, or FP8's `{"params": ..., "_overwrite_with_gradient": ...}`.
          tx: any optax transformation.
          dtype: dtype of the weights, as in `lowmem.init`. None makes f32 parameters bf16 where
            their optimizer splits master weights, as those of this library do, and leaves all
            others as they are. Layers with `dtype=None` compute in the wider of the weights' dtype
            and their inputs': from an embedding on, a model then computes in bf16.
          keep_f32: as in `lowmem.init`; `("*",)` leaves all parameters as they are.
          allow_rounding: as in `lowmem.init`.
          **kwargs: additional fields of a subclass.

        Returns:
          The state.

        Raises:
          TypeError: for unknown fields; with a dtype, for parameters that are not floats.
          ValueError: with a dtype, if an f32 leaf would lose precision; if a pattern of `keep_f32`
            matches no leaf.

        Memory: 2 bytes per bf16 weight, and 3.19 of state for `flash_adamw`; 4 and 2.19 in f32.
        """
        if dtype is not None and "dtype" in cls.__dataclass_fields__:
            raise TypeError(
                f"{cls.__name__} has a field `dtype`, but `create` uses the argument `dtype` for "
                "the weights: rename the field."
            )
        weights, opt_state = _start(tx, _trained(params), dtype, keep_f32, allow_rounding)
        if _overwrites(params):
            weights = core.copy(params, {"params": weights})
        return cls(step=0, apply_fn=apply_fn, params=weights, tx=tx, opt_state=opt_state, **kwargs)

    def apply_gradients(self, *, grads: optax.Updates, **kwargs: object) -> Self:
        """Return the state after one step, with new `step`, `params` and `opt_state`.

        Args:
          grads: gradients with the structure of `params`.
          **kwargs: other fields to replace.

        Returns:
          A new state.
        """
        params, opt_state = chain.step(
            self.tx, _trained(grads), self.opt_state, _trained(self.params)
        )
        if _overwrites(grads):
            params = {"params": params, OVERWRITE_WITH_GRADIENT: grads[OVERWRITE_WITH_GRADIENT]}
        return self.replace(step=self.step + 1, params=params, opt_state=opt_state, **kwargs)

    def master_params(self) -> PyTree:
        """Reconstruct the f32 parameters from `params` and `opt_state`, in a tree like `params`."""
        trained = masters.master_params(_trained(self.params), self.opt_state)
        return core.copy(self.params, {"params": trained}) if _overwrites(self.params) else trained


class Optimizer(nnx.Optimizer[M]):
    """`flax.nnx.Optimizer` whose `update` is the fused step.

    Parameters, state and step count are bitwise equal to Flax's unless XLA fuses multiply-adds
    differently. This class donates nothing: use `nnx.jit(train_step, donate_argnums=(0, 1))`.

    Deviations: if variables have sharding metadata, state arrays whose shape differs from the
    parameter's (scales, placeholders) are sharded along the mesh axes that divide them, which is an
    error in Flax; `update` returns the change of the parameters.

    Args:
      model: an NNX module.
      tx: any optax transformation.
      wrt: the variables to train, as in `nnx.grad`; usually `nnx.Param`.
      graph: as in Flax.
      dtype: dtype of the weights, as in `lowmem.init`, which replace the model's parameters in
        place. None makes f32 parameters bf16 where `tx` splits master weights, as optimizers of
        this library do, and leaves all others as they are; within `substitute` it leaves all.
        Layers with `dtype=None` compute in the wider of the weights' dtype and their inputs': from
        an embedding on, a model then computes in bf16.
      keep_f32: as in `lowmem.init`; `("*",)` leaves all parameters as they are.
      allow_rounding: as in `lowmem.init`.

    Raises:
      TypeError: without `wrt`; with a dtype, for parameters that are not floats.
      ValueError: with a dtype, if an f32 leaf would lose precision; if a pattern of `keep_f32`
        matches no leaf.

    Memory: 2 bytes per bf16 weight, and 3.19 of state for `flash_adamw`; 4 and 2.19 in f32.

    Example:
      >>> import jax.numpy as jnp, optax_lowmem as lowmem
      >>> from flax import nnx
      >>> from optax_lowmem.flax import Optimizer
      >>> model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
      >>> optimizer = Optimizer(model, lowmem.flash_adamw(1e-3), wrt=nnx.Param)
      >>> @nnx.jit
      ... def train_step(model, optimizer, x):
      ...     grads = nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model)
      ...     optimizer.update(model, grads)
      >>> train_step(model, optimizer, jnp.ones((8, 64)))
      >>> model.kernel.dtype, optimizer.master_params(model)["kernel"].dtype
      (dtype(bfloat16), dtype('float32'))
    """

    def __init__(
        self,
        model: M,
        tx: optax.GradientTransformation,
        *,
        wrt: nnx.filterlib.Filter,
        graph: bool | None = None,
        dtype: WeightDtype | None = None,
        keep_f32: Sequence[str] = (),
        allow_rounding: bool = False,
    ):
        params = nnx.state(model, wrt, graph=graph)
        if dtype is None and nnx.Optimizer is not _FLAXS_OPTIMIZER:  # within `substitute`
            weights, opt_state = params, tx.init(params)
        else:
            weights, opt_state = _start(tx, params, dtype, keep_f32, allow_rounding)
        fitted = jax.tree.map(_fit_sharding, opt_state, is_leaf=array_metadata.is_variable)
        # Flax's constructor wraps what `init` returns in new variables:
        # https://github.com/google/flax/pull/4180
        ready = optax.GradientTransformationExtraArgs(lambda _: fitted, tx.update)
        known = {} if graph is None else {"graph": graph}  # unknown to Flax before 0.12.7
        super().__init__(model, ready, wrt=wrt, **known)
        self.graph = graph
        self.tx = tx
        if weights is not params:
            nnx.update(model, weights)

    # Flax's annotation has positional arguments only; its implementation takes keywords too
    def update(self, model: M, grads: optax.Updates, **kwargs: object) -> PyTree:  # type: ignore[override]
        """Take one step: update the model's parameters, the state and the step count in place.

        Args:
          model: the model; its other variables are unchanged.
          grads: the gradients from `nnx.grad`.
          **kwargs: extra arguments of the optimizer, such as `value=`, and those of `lowmem.step`.

        Returns:
          The change of the parameters, new - old, in f32. Under jit it costs nothing if unused.
        """
        params = as_pure(nnx.state(model, self.wrt, graph=self.graph))
        gradients = as_pure(nnx.state(grads, self.wrt, graph=self.graph))
        new, opt_state = chain.step(
            self.tx, gradients, as_pure(self.opt_state), params, **as_pure(kwargs)
        )
        self._assign(model, new, opt_state)
        return jax.tree.map(_change, new, params)

    def release_step(
        self,
        model: M,
        loss_fn: Callable[[M, PyTree], PyTree],
        batch: object,
        *,
        layers: str | Sequence[str] = (),
        has_aux: bool = False,
        **kwargs: Any,
    ) -> PyTree:
        """Take one step by gradient release, in place of `nnx.value_and_grad` and `update`.

        Parameters, state and step count are updated in place, and so are the model's other
        variables (counts of dropout, statistics of `BatchNorm`).

        Args:
          model: the model.
          loss_fn: (model, batch) -> loss, or (loss, aux).
          batch: passed to `loss_fn`.
          layers: as in `optax_lowmem.release.train_step`, in the state of the model.
          has_aux: whether `loss_fn` returns (loss, aux).
          **kwargs: other arguments of `optax_lowmem.release.train_step`.

        Returns:
          The loss, or (loss, aux).

        Raises:
          ValueError: as `optax_lowmem.release.train_step`.
        """
        split: Callable[..., PyTree] = functools.partial(nnx.split, graph=self.graph)
        graphdef, params, others = split(model, self.wrt, ...)

        def loss(params: PyTree, given: PyTree) -> PyTree:
            others, batch = given
            merged = nnx.merge(graphdef, params, others)
            result = loss_fn(merged, batch)
            value, aux = result if has_aux else (result, None)
            return value, (aux, split(merged, self.wrt, ...)[2])

        step = train_step(self.tx, loss, layers=layers, has_aux=True, **kwargs)
        given = as_pure(params), as_pure(self.opt_state), (as_pure(others), batch)
        (value, (aux, others)), new, opt_state = step(*given)
        self._assign(model, nnx.merge_state(new, others), opt_state)
        return (value, aux) if has_aux else value

    def _assign(self, model: M, variables: PyTree, opt_state: optax.OptState) -> None:
        nnx.update(model, variables)
        nnx.update(self.opt_state, nnx.state(opt_state, graph=self.graph))
        self.step[...] += 1

    def master_params(self, model: M) -> PyTree:
        """Reconstruct the f32 parameters from a model's weights and this optimizer's state.

        Args:
          model: the model that this optimizer trains.

        Returns:
          An `nnx.State` of f32 parameters, for `nnx.update` of a clone or for `nnx.merge`.
        """
        params = nnx.state(model, self.wrt, graph=self.graph)
        return masters.master_params(params, as_pure(self.opt_state))


def _change(new: jax.Array, old: jax.Array) -> jax.Array:
    dtype = jnp.promote_types(new.dtype, jnp.float32)
    return new.astype(dtype) - old.astype(dtype)


def _fit_sharding(leaf: object) -> PyTree:
    """Restrict the sharding of a state variable to the axes that divide its shape.

    Flax gives each leaf of the state its parameter's sharding, even if their shapes differ.
    """
    inside = jax.tree.leaves(leaf)  # empty if a mask excludes the leaf
    if not array_metadata.is_variable(leaf) or len(inside) != 1:
        return leaf
    return array_metadata.fitted_variable(leaf, jnp.shape(inside[0]))


@contextlib.contextmanager
def substitute() -> Iterator[None]:
    """Within this context `flax.nnx.Optimizer` and `optax.MultiSteps` are those of this package.

    For trainers that make them themselves, such as tunix's and MaxText's. The first is `Optimizer`,
    with its fused step, on weights of the trainer's dtype. The second, given a number of steps and
    no other arguments, is `accumulate_gradients`, whose mean takes 2 bytes per parameter instead of
    4. The names are replaced for all threads; objects made within the context remain what they are.

    Example:
      >>> import optax_lowmem as lowmem
      >>> from flax import nnx
      >>> from optax_lowmem.flax import Optimizer, substitute
      >>> model, tx = nnx.Linear(64, 64, rngs=nnx.Rngs(0)), lowmem.flash_adamw(1e-3)
      >>> with substitute():
      ...     optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)  # in a trainer's constructor
      >>> type(optimizer) is Optimizer
      True
    """
    originals = nnx.Optimizer, optax.MultiSteps

    def accumulate(opt: object, every_k_schedule: Any, *args: Any, **kwargs: Any) -> object:
        if args or kwargs or callable(every_k_schedule):
            return originals[1](opt, every_k_schedule, *args, **kwargs)
        return accumulate_gradients(opt, every_k_schedule)

    nnx.Optimizer, optax.MultiSteps = Optimizer, accumulate  # type: ignore[misc]
    try:
        yield
    finally:
        nnx.Optimizer, optax.MultiSteps = originals  # type: ignore[misc]
