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
from optax_lowmem._src.optim.optimizers.record import name_of

KERNELS = ("xla", "pallas", "triton")  # `lowmem.step`'s implementations
ROUNDINGS = ("nearest", "stochastic")
NAMES = (
    *("lowmem.step", *(f"lowmem.step-{how}" for how in (*KERNELS, *ROUNDINGS, "4bit", "bf16"))),
    *("lowmem.update", "lowmem.update-nearest", "optax-f32", "optax-bf16", "flashoptim-jax"),
)


class Unavailable(Exception):
    """An implementation that cannot run here, and why."""


@dataclasses.dataclass(frozen=True)
class Implementation:
    init: Callable[[Any], Any]  # the state from weights
    step: Callable[[Any, Any, Any], tuple[Any, Any]]  # (gradients, state, weights) -> the new two
    dtype: Any  # of weights and gradients
    version: str = ""  # of the package it comes from
    compiles_init: bool = True  # in seconds
    shardings: Any = None  # of weights and state
    rereads: Callable[[Any], int] = lambda grads: 0  # bytes of gradients read a second time


def make(name: str, leaf_set: str, optimizer: str) -> Implementation:
    """An implementation by name, for a case.

    Raises:
      Unavailable: where a package is missing or a kernel cannot take a leaf.
    """
    hyper, plain = cases.OPTIMIZERS[optimizer], cases.RECORDS[optimizer].in_optax
    if name == "flashoptim-jax":
        return _flashoptim(name_of(plain), hyper)
    package, _, how = name.partition("-")
    if package == "optax":  # every moment follows the dtype of the parameters
        tx, dtype = plain(**hyper), jnp.float32 if how == "f32" else jnp.bfloat16
        return Implementation(tx.init, update_and_apply(tx), dtype, f"optax {optax.__version__}")
    storage = _default_storage(optimizer)
    if how in ROUNDINGS:
        storage = dataclasses.replace(storage, rounding=how)
    if how == "bf16":  # weights without corrections
        storage = dataclasses.replace(
            storage, master_weight_bits=None, master_rounding="stochastic"
        )
    tx = ours(optimizer, leaf_set, four_bits(storage) if how == "4bit" else storage)
    step = update_and_apply(tx) if package == "lowmem.update" else step_of(tx)
    if how in KERNELS:
        step, shapes = step_of(tx, how), cases.LEAF_SETS[leaf_set]()
        bf16 = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.bfloat16), shapes)
        try:  # one asked for by name says itself which leaf it cannot take, and why
            jax.eval_shape(step, bf16, jax.eval_shape(tx.init, bf16), bf16)
        except ValueError as error:
            raise Unavailable(str(error)) from error
    version = f"optax-lowmem {lowmem.__version__}"
    rereads = functools.partial(_rereads, tx.engine.structure)
    return Implementation(tx.init, step, jnp.bfloat16, version, rereads=rereads)


def _default_storage(optimizer: str) -> lowmem.Storage:
    return inspect.signature(cases.RECORDS[optimizer].make).parameters["storage"].default


def four_bits(default: lowmem.Storage) -> lowmem.Storage:
    """Codes of 4 bits, as the guide has them: where elements share second moments, of m alone."""
    shared = default.nu is None and default.mu is not None
    return lowmem.Storage.four_bit(**({"nu": None, "group_size": 32} if shared else {}))


def ours(optimizer: str, leaf_set: str, storage: lowmem.Storage | None = None) -> Any:
    """Our optimizer of a case, with its default storage or another."""
    make, storage = cases.RECORDS[optimizer].make, storage or _default_storage(optimizer)
    hyper: dict[str, Any] = cases.OPTIMIZERS[optimizer] | {"storage": storage}
    if "blocks" in inspect.signature(make).parameters:
        heads, kv_heads = cases.HEADS.get(leaf_set, (None, None))
        hyper["blocks"] = lowmem.blocks.Structure(heads, kv_heads, default="whole")
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
    def step(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        return lowmem.step(tx, grads, state, params, implementation=implementation, **where)

    return step


def _flashoptim(optimizer: str, hyper: dict[str, float]) -> Implementation:
    """As its README has it: bf16 weights, 24-bit masters, fused kernels (GPU only)."""
    if importlib.util.find_spec("flashoptim_jax") is None:
        raise Unavailable("flashoptim_jax is not installed")
    package = importlib.import_module("flashoptim_jax")
    make = getattr(package, f"flash_{optimizer}", None)
    if make is None:
        raise Unavailable(f"flashoptim_jax has no such {optimizer}")
    tx = make(**hyper, fused=jax.default_backend() == "gpu")

    def step(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        return tx.step(params, state, grads)

    # its init encodes zeros, which XLA would spend minutes on folding
    version = f"flashoptim-jax {importlib.metadata.version('flashoptim-jax')}"
    return Implementation(tx.init, step, jnp.bfloat16, version, compiles_init=False)
