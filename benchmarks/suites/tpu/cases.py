"""Steps that are compiled, of every optimizer on the leaves of a Llama, beside `optax.adamw`."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

import optax_lowmem as lowmem
from benchmarks import model_shapes
from benchmarks.suites.tpu import chips

BASE = "optax.adamw"  # in f32
_MATRICES = ((2048, 8192), (32000, 2048), (8192, 2048), (128256, 2048))
ON_FOUR = "/2x2"  # of a case on a mesh, where leaves are sharded along their first axis


def _single(shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return {"kernel": shape}


def _layer() -> dict[str, tuple[int, ...]]:
    """All leaves of a layer of Llama-3.2-1B."""
    leaves = model_shapes.llama_3_2_1b()["model"]["layers"]["0"]
    named = jax.tree_util.tree_leaves_with_path(leaves)
    return {jax.tree_util.keystr(path, simple=True, separator="."): x.shape for path, x in named}


# case -> shapes of its leaves
LEAVES: dict[str, dict[str, tuple[int, ...]]] = {
    **{"x".join(map(str, shape)): _single(shape) for shape in _MATRICES},
    "stack-of-16": {"x".join(map(str, shape)): (16, *shape) for shape in _MATRICES[:3]},
    "llama-layer": _layer(),
}
LEAVES |= {f"{case}{ON_FOUR}": LEAVES[case] for case in ("2048x8192", "llama-layer")}
XLA = "-xla"  # behind an optimizer's name: its step without kernels
IMPLEMENTATIONS = (BASE, *lowmem.OPTIMIZERS, *(f"flash_{name}{XLA}" for name in ("adamw", "lion")))

Prepared = tuple[Callable[..., Any], tuple[Any, ...]]


def masters(case: str) -> dict[str, Any]:
    """The f32 leaves of a case."""
    return {name: jax.ShapeDtypeStruct(x, jnp.float32) for name, x in LEAVES[case].items()}


def prepared(chip: str, case: str, impl: str) -> tuple[Any, Callable[..., Any], tuple[Any, ...]]:
    """The mesh, the step and its abstract gradients, state and parameters."""
    four = case.endswith(ON_FOUR)
    mesh = chips.mesh(chip, (2, 2) if four else (1, 1))
    specs = {
        name: PartitionSpec(chips.AXIS) if four and len(x.shape) > 1 else PartitionSpec()
        for name, x in masters(case).items()
    }
    step, (grads, state, params) = (_optax if impl == BASE else _ours(impl, mesh, specs))(
        masters(case)
    )
    if impl == BASE:
        lies = optax.tree.map_params(
            optax.adamw(1e-3), lambda _, spec: spec, state, specs,
            transform_non_params=lambda _: PartitionSpec(),
        )  # fmt: skip
    else:
        tx = transformation(impl)
        lies = lowmem.sharding.state_shardings(tx, params, specs, mesh=mesh)
    own = [chips.placed(mesh, tree, of) for tree, of in
           zip((grads, state, params), (specs, lies, specs), strict=True)]  # fmt: skip
    return mesh, step, tuple(own)


def _optax(leaves: Any) -> Prepared:
    tx = optax.adamw(1e-3)

    def step(grads: Any, state: Any, params: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step, (leaves, jax.eval_shape(tx.init, leaves), leaves)


def transformation(impl: str) -> optax.GradientTransformationExtraArgs:
    """The optimizer of one of our implementations."""
    return lowmem.OPTIMIZERS[impl.removesuffix(XLA)].make(1e-3)


def _ours(impl: str, mesh: Any, specs: Any) -> Callable[[Any], Prepared]:
    how = "xla" if impl.endswith(XLA) else None
    where = {"mesh": mesh, "specs": specs} if mesh.size > 1 else {}

    def made(leaves: Any) -> Prepared:
        tx = transformation(impl)
        params, state = jax.eval_shape(lambda p: lowmem.init(tx, p), leaves)

        def step(grads: Any, state: Any, params: Any) -> Any:
            return lowmem.step(tx, grads, state, params, implementation=how, **where)

        return step, (params, state, params)

    return made


def compile_case(chip: str, case: str, impl: str) -> tuple[Any, float]:
    """The program of a case for a chip, with donated state and parameters; and seconds."""
    mesh, step, args = prepared(chip, case, impl)
    lies = jax.tree.map(lambda x: x.sharding, (args[2], args[1]))
    return chips.compiled(mesh, step, *args, donate=(1, 2), out_shardings=lies)


def logical_bytes(tree: Any) -> int:
    """Bytes of the arrays of a tree, of one device, without the padding of tiles."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


def prepares(impl: str) -> str | None:
    """Return what one of our implementations takes means over before its step: `UpdateRule`."""
    return lowmem.OPTIMIZERS[impl.removesuffix(XLA)].rule.prepares


def read_twice(chip: str, case: str, impl: str) -> int:
    """Bytes that a step must read a second time, after a mean over them; 0 without one."""
    if impl == BASE or prepares(impl) is None:
        return 0
    _, _, (grads, state, _) = prepared(chip, case, impl)
    # StableAdamW's mean is of gradient and second moment
    slots = (state.nu, state.nu_scale) if prepares(impl) == "leaf" else ()
    return logical_bytes((grads, slots))


def ideal_bytes(chip: str, case: str, impl: str) -> tuple[int, int]:
    """Bytes of a step that moves each once, and those of the state and parameters it rewrites."""
    _, _, (grads, state, params) = prepared(chip, case, impl)
    rewritten = logical_bytes((state, params))
    return logical_bytes(grads) + 2 * rewritten, rewritten
