"""The training step of a layered model."""

from collections.abc import Callable
from typing import Any

import jax
import optax

from optax_lowmem._src.core import scope
from optax_lowmem._src.core.placement import placements
from optax_lowmem._src.release.backward import backward
from optax_lowmem._src.release.model import Layered
from optax_lowmem._src.release.run import Gradient, Run
from optax_lowmem._src.update import IMPLEMENTATIONS
from optax_lowmem._src.update.engine import Engine, Optimizer


def train_step(
    tx: optax.GradientTransformation,
    model: Layered,
    *,
    each_gradient: Gradient | None = None,
    per_layer: bool = False,
    implementation: str | None = None,
    mesh: jax.sharding.Mesh | None = None,
    specs: Any = None,
) -> Callable[[Any, Any, Any], tuple[Any, Any, Any]]:
    """A training step in which the gradients of stacked layers never exist all at once.

    Forward as usual, keeping the input of every layer; then backward in a loop over the layers that
    holds weights and state, and in which a layer's gradient is taken (from its input, computing the
    layer again), its slice of every weight and slot stepped, and written back in its place. The
    rest of the parameters follow as soon as no earlier stage reads them.

    The result is that of `jax.value_and_grad(model)` and `lowmem.step`, random bits included.

    Args:
      tx: one of our optimizers, such as `flash_adamw(schedule, mask=...)`.
      model: stages and stacks.
      each_gradient: applied to every gradient, one layer's at a time without its axis of layers:
        elementwise work such as clipping by value, or `lax.pmean` inside a `shard_map`.
      per_layer: let an optimizer that measures whole tensors (`stable_adamw`'s RMS_t) measure each
        layer on its own, as in the same model unrolled; else it is refused.
      implementation: as of `lowmem.step`.
      mesh: likewise.
      specs: likewise; the axis of layers lies on no mesh axis.

    Returns:
      (params, state, batch) -> (loss, params, state), with (loss, aux) for a model `has_aux`. Jit
      it with `donate_argnums=(0, 1)`: nothing is donated here.

    Raises:
      TypeError: for another model or gradient function.
      ValueError: for a transformation that may need all gradients at once: whatever stands around
        one of our optimizers, or before it (clipping by the global norm, `accumulate_gradients`,
        `MultiSteps`). In the step, for a leaf whose layers are not independent, by name.

    Memory: beside weights, state and the inputs of the layers (what rematerialisation of each layer
    keeps anyway), the working set of one layer: its backward, its gradients, and a copy of its
    slices. An ordinary step holds the gradients of all layers, 2 or 4 bytes a parameter.

    Numerics: XLA may fuse the multiply-adds of the two programs differently: last bits, which are
    codes only next to a rounding boundary. Means over a block of Adam-mini are taken layer by
    layer. A parameter that several stages read has its gradients added stage by stage.

    Example:
      >>> import jax, jax.numpy as jnp, optax_lowmem as lowmem
      >>> from optax_lowmem import release
      >>> model = release.Layered(
      ...     first=lambda rest, batch: rest["embed"][batch],
      ...     layers={"layers": lambda own, rest, x, batch: x + jnp.tanh(x @ own["w"])},
      ...     last=lambda rest, x, batch: jnp.mean((x @ rest["embed"].T - 1) ** 2),
      ... )
      >>> params = {"embed": jnp.ones((5, 4)), "layers": {"w": jnp.ones((3, 4, 4))}}
      >>> tx = lowmem.flash_adamw(1e-3)
      >>> params, state = lowmem.init(tx, params)
      >>> step = jax.jit(release.train_step(tx, model), donate_argnums=(0, 1))
      >>> loss, params, state = step(params, state, jnp.array([0, 1]))
      >>> print(params["layers"]["w"].shape, state.count)
      (3, 4, 4) 1
    """
    engine = _engine_of(tx)
    if not isinstance(model, Layered):
        raise TypeError(f"model takes a release.Layered, got {type(model).__name__}")
    if each_gradient is not None and not callable(each_gradient):
        raise TypeError(f"each_gradient takes a function of an array, got {each_gradient!r}")
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(
            f"implementation must be one of {IMPLEMENTATIONS} or None, got {implementation!r}"
        )

    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, Any]:
        places = None if specs is None else placements(params, specs, mesh)
        with scope.implementing(implementation), scope.placing(places):
            run = Run.begin(engine, model, params, state, each_gradient, per_layer)
            loss = backward(model, run, batch)
            return loss, *run.result(params)

    return step


def _engine_of(tx: Any) -> Engine:
    if isinstance(tx, Optimizer) and tx.engine.weights:
        return tx.engine
    if isinstance(tx, Optimizer):
        raise ValueError(
            "a bare direction (scale_by_*) has no learning rate to step with: use the optimizer "
            "itself, such as flash_adamw."
        )
    update = getattr(tx, "update", None)
    name = getattr(update, "__qualname__", type(tx).__qualname__).split(".<locals>")[0]
    name = f"{getattr(update, '__module__', type(tx).__module__)}.{name}"
    raise ValueError(
        f"gradient release takes one of our optimizers itself, such as flash_adamw(...), not "
        f"{name}. What stands around it or before it may need the gradients of all layers at once "
        "(clipping by the global norm, accumulate_gradients, MultiSteps, apply_if_finite), and "
        "they never exist together here. Use jax.value_and_grad(model) and lowmem.step with it; or "
        "give elementwise work on gradients as each_gradient=, a mask of decay as mask=, a "
        "learning rate from outside as an f32 argument of the jitted step that builds the "
        "optimizer."
    )
