"""Calls that are partitioned by callback, once XLA knows the shardings of all operands.

`jax.experimental.custom_partitioning` does this too, but names a call by an address: a program with
one is never found in the persistent compilation cache. Here a call is named by its content. This is
the only module that uses JAX's private API; without it (`available`) kernels run on one device, in
a `shard_map`, and where `lowmem.step` is given `specs=`.
"""

# https://github.com/jax-ml/jax/issues/21159 (cache)
# https://github.com/jax-ml/jax/issues/38196 (not on TPUs)
# https://github.com/jax-ml/jax/issues/34811 (not on Explicit axes)

import abc
import contextlib
import contextvars
import functools
import hashlib
import inspect
import itertools
import math
import re
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    CompoundFactor,
    SdyShardingRule,
    custom_partitioning,
)
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.interpreters import mlir
from jax.sharding import Mesh

from optax_lowmem._src.arrays.shards import EVERY, Shards
from optax_lowmem._src.arrays.typing import PyTree

try:
    from jax._src import custom_partitioning as _jax
    from jax._src import xla_bridge
    from jax._src.lib import xla_client
    from jax._src.sharding_impls import GSPMDSharding, ShardingContext
    from jaxlib.mlir import ir
except ImportError:  # pragma: no cover
    _jax = None  # type: ignore[assignment]

_CALL = "lowmem_partitioned"  # name of the custom call
_ADDRESS = re.compile(" at 0x[0-9a-f]+")


@functools.cache
def available() -> bool:
    """Return whether this JAX has what `lower` uses."""
    return (
        _jax is not None
        and hasattr(_jax, "_sharding_callbacks")
        and hasattr(_jax, "_custom_partitioning_partition")
        and hasattr(_jax, "_custom_partitioning_propagate_user_sharding")
        and hasattr(_jax, "_custom_partitioning_infer_sharding_from_operands")
        and hasattr(xla_client, "register_custom_call_partitioner")
        and hasattr(xla_bridge, "register_plugin_callbacks")
        and hasattr(xla_client.HloSharding, "tile_assignment_devices")
        and list(inspect.signature(ShardingContext).parameters)[:2]
        == ["num_devices", "device_assignment"]
        and {"keepalives", "platforms", "axis_context"}
        <= set(inspect.signature(mlir.ModuleContext).parameters)
    )


class Factor(NamedTuple):
    """A dimension of an array that may be sharded, in units of neighbours on one device.

    Dimensions with one name have one sharding. Elements in 3 groups of 32 are `Factor("n", 3, 32)`,
    and their scales `Factor("n", 3)`.
    """

    name: str
    units: int
    unit: int = 1


def sharding_rule(
    operands: Sequence[Sequence[Factor | None]], results: Sequence[Sequence[Factor | None]]
) -> SdyShardingRule:
    """Return Shardy's rule for arrays of these dimensions; None is a replicated dimension."""
    replicated: list[str] = []
    sizes: dict[str, Any] = {}

    def mapping(dimension: Factor | None) -> str | CompoundFactor:
        if dimension is not None and dimension.unit == 1:
            return dimension.name
        replicated.append(f"replicated{len(replicated)}")
        if dimension is None:
            return replicated[-1]
        sizes.update({dimension.name: dimension.units, replicated[-1]: dimension.unit})
        return CompoundFactor(dimension.name, replicated[-1])

    mappings = [
        tuple(ArrayMapping(*map(mapping, dimensions)) for dimensions in arrays)
        for arrays in (operands, results)
    ]
    inferred = {factor for arrays in mappings for array in arrays for factor in array}
    return SdyShardingRule(
        *mappings,
        need_replication_factors=tuple(replicated),
        **{name: size for name, size in sizes.items() if name not in inferred},
    )


class Partition(abc.ABC):
    """Division of a call into the work of devices, each of which has parts of the operands.

    XLA calls its methods while it compiles; they use the context variables of its creation.
    """

    def __init__(self) -> None:
        self._context = contextvars.copy_context()
        self._x64 = jax.config.jax_enable_x64  # type: ignore[attr-defined]

    @property
    @abc.abstractmethod
    def content(self) -> str:
        """All that the work depends on but the operands' shapes: its key in persistent caches."""

    @abc.abstractmethod
    def named(self) -> contextlib.AbstractContextManager[None]:
        """Name the work: its operations have the name of the call in the compiled program."""

    @abc.abstractmethod
    def rule(self) -> SdyShardingRule:
        """Return which dimensions of operands and results have the same sharding."""

    @abc.abstractmethod
    def cut(
        self, given: Sequence[Shards | None], wanted: Sequence[Shards | None], count: int
    ) -> tuple[list[Shards], list[Shards], Callable[..., list[jax.Array]]]:
        """Return (shards of operands, shards of results, the work of one of `count` devices).

        `given` and `wanted` are how XLA would shard the operands and the results; None where XLA
        leaves it open. A device's number is `jax.lax.axis_index(EVERY)`.
        """

    def traced(self, work: Callable[..., PyTree], *args: PyTree) -> PyTree:
        """Call a function with the context variables and `enable_x64` of this object's creation."""
        same = jax.config.jax_enable_x64 == self._x64  # type: ignore[attr-defined]
        with contextlib.nullcontext() if same else jax.enable_x64(self._x64):
            return self._context.copy().run(work, *args)


_kept: dict[bytes, Any] = {}  # callbacks, by the hash of their content


def can_lower(module: mlir.ModuleContext) -> bool:
    """Return whether a call can be partitioned in a program that is lowered."""
    count = getattr(module.axis_context, "num_devices", None)
    exported = module.lowering_parameters.for_export
    return available() and not exported and count is not None


def lower(
    ctx: mlir.LoweringRuleContext,
    operands: Sequence[PyTree],
    partition: Partition,
    kernel: Jaxpr,
) -> PyTree:
    """Return the results of a partitioned call, as values of the program that is lowered.

    XLA runs the work of `partition.cut` on each device. `kernel`, the jaxpr of the call with whole
    operands, gives only the types of the results and the name. `can_lower` must hold.
    """
    module: Any = ctx.module_context
    count = module.axis_context.num_devices
    types: list[PyTree] = [x.aval for x in kernel.outvars]
    # only the types of its results count: XLA replaces the zeros by the work that `_cut` returns
    placeholder = custom_partitioning(lambda *_: [jnp.zeros(x.shape, x.dtype) for x in types])
    cut = functools.partial(_cut, partition, count)
    placeholder.def_partition(
        cut,
        infer_sharding_from_operands=lambda *args: cut(*args)[2],  # by GSPMD, without Shardy
        decode_shardings=False,
        sharding_rule=partition.rule(),
    )
    # Stand-ins of the program's devices, of which only the number counts: a program need not have
    # one mesh, nor devices of this machine.
    devices = itertools.islice(itertools.cycle(jax.devices()), count)
    stand_ins = ShardingContext(count, tuple(devices), None)
    inner = ctx.replace(module_context=module.replace(axis_context=stand_ins))

    def call(*args: jax.Array) -> list[jax.Array]:
        with partition.named():
            result: list[jax.Array] = placeholder(*args)
        return result

    values = mlir.lower_fun(call, multiple_results=True)(inner, *operands)
    content = partition.content, _program(kernel), count, module.platforms
    _name(module, values[0].owner, repr(content))
    return values


def _program(jaxpr: Jaxpr) -> list[str]:
    """Return a jaxpr's operations, with hashes of the functions that it calls."""
    made = [*jaxpr.constvars, *jaxpr.invars, *(x for eqn in jaxpr.eqns for x in eqn.outvars)]
    numbers = {id(x): str(i) for i, x in enumerate(made)}  # their names have addresses
    return [
        f"{eqn.primitive} {[numbers.get(id(x), str(x)) for x in eqn.invars]} {_params(eqn)}"
        for eqn in jaxpr.eqns
    ]


def _params(eqn: JaxprEqn) -> str:
    params = {key: _printed(x) if key == "jaxpr" else str(x) for key, x in eqn.params.items()}
    return _ADDRESS.sub("", str(params))


@functools.lru_cache(maxsize=32)  # launches of equal leaves call one function
def _printed(jaxpr: ClosedJaxpr) -> str:
    return hashlib.sha256(str(jaxpr).encode()).hexdigest()


def _cut(partition: Partition, count: int, mesh: object, args: PyTree, results: PyTree) -> PyTree:
    """Return a call's mesh, the work of a device, and the shardings of results and operands."""
    del mesh
    devices = next(x.sharding for x in args if x.sharding is not None)._internal_device_list
    shards = ([_shards_of(x) for x in every] for every in (args, results))
    of_args, of_results, work = partition.traced(partition.cut, *shards, count)

    def device(*args: jax.Array) -> list[jax.Array]:
        return partition.traced(work, *args)

    laid = [
        [GSPMDSharding(devices, _hlo_sharding(shards.tiles(count))) for shards in every]
        for every in (of_args, of_results)
    ]
    return Mesh(np.asarray(list(devices)), (EVERY,)), device, laid[1], tuple(laid[0])


def _shards_of(x: Any) -> Shards | None:
    if not isinstance(x.sharding, GSPMDSharding):
        return None
    sharding, rank = x.sharding._hlo_sharding, len(x.shape)
    if sharding.is_replicated() or not sharding.is_tiled() or sharding.subgroup_types():
        return None
    devices = np.asarray(sharding.tile_assignment_devices())
    tiles = devices.reshape(sharding.tile_assignment_dimensions())
    return Shards.of_tiles(tiles.reshape(*tiles.shape[:rank], -1))


def _hlo_sharding(tiles: np.ndarray) -> Any:
    *parts, copies = tiles.shape
    if math.prod(parts) == 1:
        return xla_client.HloSharding.replicate()
    proto = xla_client.OpSharding()
    proto.type = xla_client.OpSharding.Type.OTHER
    proto.tile_assignment_dimensions = [*parts, *([copies] if copies > 1 else [])]
    proto.tile_assignment_devices = tiles.reshape(-1).tolist()
    proto.replicate_on_last_tile_dim = copies > 1
    return xla_client.HloSharding.from_proto(proto)


def _name(module: Any, call: Any, content: str) -> None:
    """Name a call by what it computes.

    JAX names it by the address of its callback, which differs in each process, so the persistent
    cache never has the program: https://github.com/jax-ml/jax/issues/21159. JAX finds callbacks in
    a private table, to which the name is added. As the callback is kept here, the executable need
    not keep it, and can be serialized. `tests/core/test_upstream.py` fails once JAX's own names no
    longer depend on addresses.
    """
    named = ir.StringAttr(call.attributes["backend_config"]).value
    key = hashlib.sha256(f"{jax.__version__} {content}".encode()).hexdigest()
    callback = _jax._sharding_callbacks[named.encode()]
    callback.module_context = types.SimpleNamespace(
        platforms=module.platforms, backend=module.backend
    )
    callback.answers = {}
    _kept[key.encode()] = _jax._sharding_callbacks[key.encode()] = callback
    module.keepalives.remove(callback)
    call.attributes["backend_config"] = ir.StringAttr.get(key)
    _register()
    call.attributes["call_target_name"] = ir.StringAttr.get(_CALL)


@functools.cache
def _register() -> None:
    """Register `_answer` as the callback by which XLA partitions calls."""
    register = functools.partial(
        xla_client.register_custom_call_partitioner,
        name=_CALL,
        prop_user_sharding=_jax._custom_partitioning_propagate_user_sharding,
        partition=_answer,
        infer_sharding_from_operands=_jax._custom_partitioning_infer_sharding_from_operands,
        can_side_effecting_have_replicated_sharding=True,
    )
    register()
    xla_bridge.register_plugin_callbacks(register)


def _answer(*asked: Any) -> Any:
    """Partition a call by JAX's callback, with a cache for equal calls of a program.

    To lower a kernel takes up to a second, and a model has equal calls in each of its layers.
    """
    answers = _kept[asked[-1]].answers
    question = repr(asked)
    if question not in answers:
        answers[question] = _jax._custom_partitioning_partition(*asked)
    return answers[question]
