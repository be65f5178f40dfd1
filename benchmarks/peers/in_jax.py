"""Implementations of a step in JAX: ours, optax's and flashoptim-jax's."""

import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import optax_lowmem as lowmem
from benchmarks.peers import cases
from optax_lowmem._src.optimizers.record import name_of

# implementation -> `lowmem.step`'s argument
STEPS = {"lowmem.step": None} | {
    f"lowmem.step-{name}": name for name in ("xla", "pallas", "triton")
}
STEPS |= dict.fromkeys(f"lowmem.step-{name}" for name in ("nearest", "stochastic", "4bit"))
NAMES = (*STEPS, "lowmem.update", "lowmem.update-nearest", "optax-f32", "optax-bf16",
         "flashoptim-jax")  # fmt: skip


class Unavailable(Exception):
    """An implementation that cannot run here, and why."""


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to make a step."""

    init: Callable[[Any], Any]  # the state from weights
    step: Callable[[Any, Any, Any], tuple[Any, Any]]  # (gradients, state, weights) -> the new two
    dtype: Any  # of weights and gradients
    version: str  # of the package it comes from
    compiles_init: bool = True  # in seconds
    rereads: Callable[[Any], int] = lambda grads: 0  # bytes of gradients read a second time


def make(name: str, leaf_set: str, optimizer: str) -> Implementation:
    """An implementation by name, for a case.

    Raises:
      Unavailable: where a package is missing or a kernel cannot take a leaf.
    """
    hyper, plain = cases.OPTIMIZERS[optimizer], cases.RECORDS[optimizer].in_optax
    if name == "flashoptim-jax":
        return _flashoptim(name_of(plain), hyper)
    if name in ("optax-f32", "optax-bf16"):
        dtype = jnp.float32 if name == "optax-f32" else jnp.bfloat16
        return _optax(plain(**hyper), dtype)
    rounding = next((r for r in ("nearest", "stochastic") if name.endswith(r)), None)
    storage = four_bits(optimizer) if name.endswith("-4bit") else None
    tx = ours(optimizer, leaf_set, rounding, storage)
    if name.startswith("lowmem.update"):
        step = update_and_apply(tx)
    else:
        step = _fused(tx, STEPS[name], cases.LEAF_SETS[leaf_set]())
    rereads = functools.partial(_rereads, tx.engine.structure)
    return Implementation(tx.init, step, jnp.bfloat16, _version(lowmem), rereads=rereads)


def _default_storage(optimizer: str) -> lowmem.Storage:
    return inspect.signature(cases.RECORDS[optimizer].make).parameters["storage"].default


def four_bits(optimizer: str) -> lowmem.Storage:
    """Codes of 4 bits, as the guide has them: where elements share second moments, of m alone."""
    default = _default_storage(optimizer)
    shared = default.nu is None and default.mu is not None
    return lowmem.Storage.four_bit(**({"nu": None, "group_size": 32} if shared else {}))


def ours(optimizer: str, leaf_set: str, rounding: str | None = None, storage: Any = None) -> Any:
    """Our optimizer of a case; `rounding` or the whole `storage` other than its own default."""
    hyper: dict[str, Any] = dict(cases.OPTIMIZERS[optimizer])
    make = cases.RECORDS[optimizer].make
    if "blocks" in inspect.signature(make).parameters:
        heads, kv_heads = cases.HEADS.get(leaf_set, (None, None))
        hyper["blocks"] = lowmem.blocks.Structure(heads, kv_heads, default="whole")
    if storage is None:
        storage = _default_storage(optimizer)
    if rounding is not None:
        storage = dataclasses.replace(storage, rounding=rounding)
    hyper["storage"] = storage
    return make(**hyper)


def _rereads(structure: Any, grads: Any) -> int:
    """A block that spans rows is known only after all of them, and then they are read again."""
    if structure is None:
        return 0
    rows = zip(structure.infer(grads).values(), jax.tree.leaves(grads), strict=True)
    return sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize
        for block, leaf in rows
        if block.mean_shape(leaf.shape)[:-1] != leaf.shape[:-1]
    )


def update_and_apply(tx: optax.GradientTransformation) -> Callable[..., Any]:
    """A step of (gradients, state, weights) as optax writes it."""

    def step(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def step_of(tx: Any, implementation: str | None = None, **where: Any) -> Callable[..., Any]:
    """A step of (gradients, state, weights) by `lowmem.step`."""

    def step(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        return lowmem.step(tx, grads, state, params, implementation=implementation, **where)

    return step


def _fused(tx: Any, implementation: str | None, shapes: Any) -> Callable[..., Any]:
    step = step_of(tx, implementation)
    if implementation is not None:
        bf16 = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.bfloat16), shapes)
        try:  # one asked for by name says itself which leaf it cannot take, and why
            jax.eval_shape(step, bf16, jax.eval_shape(tx.init, bf16), bf16)
        except ValueError as error:
            raise Unavailable(str(error)) from error
    return step


def _optax(tx: optax.GradientTransformation, dtype: Any) -> Implementation:
    """Every moment follows the dtype of the parameters, also where no `mu_dtype` is given."""
    return Implementation(tx.init, update_and_apply(tx), dtype, _version(optax))


def _flashoptim(optimizer: str, hyper: dict[str, float]) -> Implementation:
    """As its README has it: bf16 weights, 24-bit masters, fused kernels (GPU only)."""
    package = imported("flashoptim_jax")
    make = getattr(package, f"flash_{optimizer}", None)
    if make is None:
        raise Unavailable(f"flashoptim_jax has no such {optimizer}")
    tx = make(**hyper, fused=jax.default_backend() == "gpu")

    def step(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        return tx.step(params, state, grads)

    # its init encodes zeros, which XLA would spend minutes on folding
    return Implementation(tx.init, step, jnp.bfloat16, _version(package), compiles_init=False)


def imported(package: str) -> Any:
    """A package, or Unavailable where it is not installed."""
    if importlib.util.find_spec(package) is None:
        raise Unavailable(f"{package} is not installed")
    return importlib.import_module(package)


def _version(module: Any) -> str:
    name = module.__name__.replace("_", "-")
    try:
        return f"{name} {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:  # a copy that is not installed
        return f"{name} {getattr(module, '__version__', 'here')}"
