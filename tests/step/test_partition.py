"""The step of a program for several devices, which nothing tells where its arrays lie.

On these CPU devices the kernel is interpreted. `implementation="pallas"` asks for it, since XLA's
code is the automatic choice for a CPU.
"""

import functools
import itertools
import os
import re
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental import serialize_executable
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import optax_lowmem as lowmem
from optax_lowmem._src.kernels import partitioned
from optax_lowmem._src.kernels.fallback import with_fallback
from optax_lowmem._src.optim.step import gpu
from optax_lowmem.sharding import state_shardings
from tests.compilation import SAME_BITS
from tests.contract_cases import assert_alike
from tests.meshes import mesh_of
from tests.step.test_mesh_kernels import (
    LAYOUTS,
    OPTIMIZERS,
    SHAPES,
    check,
    compiled,
    drawn,
    gpus,
    made,
    put,
    steps,
)
from tests.step.test_sharding import COLLECTIVES
from tests.tiers import rows

__all__ = ["gpus"]  # a fixture

pytestmark = pytest.mark.usefixtures("gpus")
POLICY = lowmem.Policy(min_size=0)
WHOLE = dict.fromkeys(SHAPES, P())
FSDP = LAYOUTS["fsdp"][1]
# sizes of the mesh, specs of the parameters, and collectives of a step
MORE = {
    "cut groups": ((8,), {"w": P("a"), "layers": P(None, None, "a"), "bias": P("a")}, None),
    "replicated": ((8,), WHOLE, set()),
    "zero": ((8,), WHOLE, {"all-gather"}),
    "zero, nothing asked": ((8,), WHOLE, set()),
    "fsdp, nothing asked": ((8,), FSDP, set()),
    "fsdp, state replicated": ((8,), FSDP, {"all-gather"}),
    "devices in another order": ((4, 2), {"w": P("b"), "layers": P(None, "a"), "bias": P()}, set()),
}
EVERY = {name: (*layout, set()) for name, layout in LAYOUTS.items()} | MORE
OFTEN = [
    ("flash_adamw", "cut groups"),
    ("flash_lion-int4", "two axes"),
    ("stable_adamw", "zero"),
    ("q_adamw", "devices in another order"),
]


@pytest.mark.parametrize("name, layout", rows(itertools.product(OPTIMIZERS, EVERY), OFTEN))
def test_layouts(name, layout):
    """The bits of one device, all donated arrays in place, and no communication but what is due."""
    sizes, specs, due = EVERY[layout]
    the_mesh, tx = mesh_of(AxisType.Auto, **dict(zip("ab", sizes, strict=False))), made(name)
    if "order" in layout:
        places = np.random.default_rng(0).permutation(jax.devices("cpu")).reshape(sizes)
        the_mesh = Mesh(places, ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    params, state = lowmem.init(tx, drawn(9, jnp.float32, 0.2), jnp.bfloat16)
    of_params = {n: NamedSharding(the_mesh, spec) for n, spec in specs.items()}
    of_state = state_shardings(tx, params, of_params, zero_axis="a" if "zero" in layout else None)
    how = {} if "asked" in layout else {"out_shardings": (of_params, of_state)}
    donated: tuple[int, ...] = (1, 2)
    if "state replicated" in layout:  # and the new state is not
        donated = ()
        of_state = jax.tree.map(lambda _: NamedSharding(the_mesh, P()), of_state)
    place = functools.partial(put, where=of_params)
    params, state = place(params), put(state, of_state)
    step = compiled(tx, donate_argnums=donated, **how)
    program = step.lower(params, state, params).compile()
    assert set(lowmem.implementations(program).values()) == {"pallas"}
    if due is not None:
        reduced = {"all-reduce"} if tx.engine.rule.prepares == "leaf" else set()
        assert set(re.findall(COLLECTIVES, program.as_text())) <= due | reduced
    if layout == "zero":  # the new weights whose state is cut, each once
        gathered = re.findall(r"= \w+\[([\d,]+)\]\S* all-gather\(", program.as_text())
        assert sorted(gathered) == ["4,16,96", "64,256"]
    if how and donated:
        aliased = len(re.findall("(?:may|must)-alias", program.as_text().split("\n", 1)[0]))
        assert aliased == len(jax.tree.leaves((params, state)))
    check(name, steps(tx, step, params, state, place))


def test_blocks_on_several_devices():
    """Adam-mini's elements are stepped by the kernel, beside XLA's means of blocks."""
    blocks = lowmem.blocks.Structure(default="whole", rules=[("w", lowmem.blocks.Block((1,)))])
    tx = lowmem.flash_adam_mini(1e-2, blocks=blocks, storage=lowmem.Storage(policy=POLICY))
    params, state = lowmem.init(tx, drawn(9, jnp.float32, 0.2), jnp.bfloat16)
    grads = drawn(1, jnp.bfloat16, 1e-3)
    wanted = compiled(tx)(grads, state, params)
    specs = {"w": P("a"), "layers": P(None, None, "a"), "bias": P()}
    of_params = {n: NamedSharding(mesh_of(a=2), spec) for n, spec in specs.items()}
    of_state = state_shardings(tx, params, of_params)
    step = compiled(tx, out_shardings=(of_params, of_state))
    given = put(grads, of_params), put(state, of_state), put(params, of_params)
    taken = lowmem.implementations(step.lower(*given).compile())
    assert taken["w"] == "pallas" and taken["w (means over blocks)"] == "pallas"
    for a, b in zip(jax.tree.leaves(step(*given)), jax.tree.leaves(wanted), strict=True):
        near = {"rtol": 1e-5} if a.dtype == jnp.float32 else {"atol": 1, "rtol": 0.01}
        np.testing.assert_allclose(np.float64(a), np.float64(b), **near)


# ---- what surrounds a step -----------------------------------------------------------------------
TX = made("flash_adamw")
MESH = mesh_of(a=8)
OF_PARAMS = {n: NamedSharding(MESH, spec) for n, spec in FSDP.items()}


@functools.cache
def start():
    params, state = lowmem.init(TX, drawn(9, jnp.float32, 0.2), jnp.bfloat16)
    return jax.device_get((drawn(0, jnp.bfloat16, 1e-3), state, params))


def step(grads, state, params):
    return lowmem.step(TX, grads, state, params, implementation="pallas")


def twice(grads, state, params):
    for _ in range(2):
        params, state = step(grads, state, params)
    return params, state


@functools.cache
def wanted(function):
    return jax.device_get(jitted(function)(*start()))


def jitted(function, **how):
    return jax.jit(function, compiler_options=SAME_BITS, **how)


def of_state():
    return state_shardings(TX, start()[2], OF_PARAMS)


def placed(where=None):
    if where is not None:
        return jax.device_put(start(), where)
    return tuple(map(put, start(), (OF_PARAMS, of_state(), OF_PARAMS)))


def same(found, wanted):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)


def case_one_of_several_devices():
    return jitted(step)(*placed(SingleDeviceSharding(jax.devices("cpu")[3])))


def case_eager():
    return step(*placed())


def case_arrays_of_numpy_with_in_shardings():
    return jitted(step, in_shardings=(OF_PARAMS, of_state(), OF_PARAMS))(*start())


def case_a_constraint_alone():
    def constrained(grads, state, params):
        return step(grads, state, jax.lax.with_sharding_constraint(params, OF_PARAMS))

    return jitted(constrained)(*start())


def case_a_mesh_in_the_context():
    with jax.set_mesh(MESH):
        return jitted(step)(*placed())


def case_two_meshes_in_one_program():
    grads, state, params = placed()
    other = NamedSharding(mesh_of(x=2, y=4), P("x"))
    grads = put(grads, dict.fromkeys(SHAPES, other))
    return jitted(step, out_shardings=(OF_PARAMS, of_state()))(grads, state, params)


def case_compiled_from_shapes():
    forms = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), placed()
    )
    return jitted(step).lower(*forms).compile()(*placed())


def test_lowered_for_more_devices_than_there_are():
    mesh = AbstractMesh((16,), ("a",), (AxisType.Auto,))
    specs = {"w": P("a"), "layers": P(None, "a"), "bias": P()}
    shardings = state_shardings(TX, start()[2], specs, mesh=mesh)
    of_params = {n: NamedSharding(mesh, spec) for n, spec in specs.items()}
    forms = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        start(), (of_params, shardings, of_params),
    )  # fmt: skip
    lowered = jax.jit(step).trace(*forms).lower(lowering_platforms=("cpu",))
    assert "@lowmem_partitioned" in lowered.as_text()


def case_a_loop_with_a_condition():
    def looped(grads, state, params):
        def body(_, carry):
            stepped = functools.partial(step, grads)
            return jax.lax.cond(
                jnp.isfinite(grads["bias"]).all(),
                lambda p, s: stepped(s, p), lambda p, s: (p, s), *carry,
            )  # fmt: skip

        return jax.lax.fori_loop(0, 1, body, (params, state))

    return jitted(looped)(*placed())


def case_a_checkpoint():
    return jitted(jax.checkpoint(step))(*placed())


def case_vmap():
    two = jax.tree.map(lambda x: np.stack([x, x]), start())
    sharding = NamedSharding(MESH, P())
    found = jitted(jax.vmap(step))(*jax.device_put(two, sharding))
    return jax.tree.map(lambda x: x[1], found)


def case_an_executable_serialized():
    # XLA cannot serialize a CPU's program that it has from the persistent cache: one of its own
    number = time.time_ns() % 1_000_003
    program = jitted(lambda *args: (step(*args), jnp.int32(number))).lower(*placed()).compile()
    loaded = serialize_executable.deserialize_and_load(*serialize_executable.serialize(program))
    return loaded(*placed())[0]


def case_exported_for_several_devices():
    exported = export.export(jax.jit(step))(*placed())
    assert exported.nr_devices == 8
    return jitted(exported.call)(*placed())


def case_exported_for_one_device():
    return jitted(export.export(jax.jit(step))(*start()).call)(*start())


def case_a_shard_map_over_some_axes():
    mesh = mesh_of(x=2, y=4)
    inside = jax.shard_map(
        step, mesh=mesh, axis_names={"x"}, in_specs=P(), out_specs=P(), check_vma=False
    )
    return jitted(inside)(*placed(NamedSharding(mesh, P())))


def case_without_the_private_api():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partitioned, "available", lambda: False)
        return jitted(step)(*placed())


CASES = {name: case for name, case in globals().items() if name.startswith("case_")}
QUICK = [
    "case_one_of_several_devices",
    "case_two_meshes_in_one_program",
    "case_vmap",
    "case_an_executable_serialized",
    "case_a_shard_map_over_some_axes",
]


@pytest.mark.parametrize("name", rows(CASES, QUICK))
def test_situations(name):
    jax.clear_caches()
    same(CASES[name](), wanted(step))


@pytest.mark.full
def test_a_scan_of_steps():
    def scanned(grads, state, params):
        carry = jax.lax.scan(lambda c, _: (step(grads, c[1], c[0]), None), (params, state), None, 2)
        return carry[0]

    same(jitted(scanned, donate_argnums=(1, 2))(*placed()), wanted(twice))


def test_the_automatic_choice(monkeypatch):
    """Of a program for a GPU, here for a CPU: shards by the kernel, or else the whole by XLA."""
    monkeypatch.setattr(
        gpu, "with_fallback", lambda _, *args, **how: with_fallback("cpu", *args, **how)
    )

    def taken(**how):
        function = functools.partial(lowmem.step, TX, **how)
        program = jitted(lambda *args: function(*args)).lower(*placed()).compile()
        assert_alike(program(*placed()), wanted(step), steps=1)
        # what XLA's partitioner inlines has the name of the call: on a GPU, the kernel's call
        names = re.findall(r"by_(\w+)/custom_partitioning", program.as_text())
        found = set(lowmem.implementations(program).values())
        assert set(names) == found - {"xla"}
        return found

    assert taken() == {"pallas"}
    assert taken(implementation="xla") == {"xla"}
    monkeypatch.setattr(partitioned, "available", lambda: False)
    assert taken() == {"xla"}


@pytest.mark.parametrize(
    "name, most, by",
    [("flash_adamw", 16_000, "pallas and pallas_or_xla"), ("flash_lion", 2_000, "pallas_or_xla")],
)
def test_a_leaf_too_large_for_a_kernel(name, most, by, monkeypatch):
    """Its shards by the kernel (interpreted, it names its operations), or as large ones by XLA."""
    monkeypatch.setattr(gpu, "MAX_ELEMENTS", most)
    monkeypatch.setattr(
        gpu, "with_fallback", lambda _, *args, **how: with_fallback("cpu", *args, **how)
    )
    tx = made(name)
    step = jitted(functools.partial(lowmem.step, tx))
    params, state = lowmem.init(tx, drawn(9, jnp.float32, 0.2), jnp.bfloat16)
    grads = drawn(1, jnp.bfloat16, 1e-3)
    shardings = OF_PARAMS, state_shardings(tx, params, OF_PARAMS), OF_PARAMS
    given = tuple(map(put, (grads, state, params), shardings))
    program = step.lower(*given).compile()
    assert lowmem.implementations(program)["w"] == by
    whole = step.lower(grads, state, params).compile()
    assert lowmem.implementations(whole)["w"] == "xla"
    assert_alike(program(*given), whole(grads, state, params), steps=1)
    with pytest.raises(ValueError, match="elements, more than a kernel's"):
        lowmem.step(tx, grads, state, params, implementation="pallas")


# ---- the persistent compilation cache ------------------------------------------------------------
CACHE = """
import dataclasses, functools, sys
import jax, jax.numpy as jnp
import optax_lowmem as lowmem
from jax.sharding import NamedSharding, PartitionSpec as P
from optax_lowmem._src.kernels import platform
from optax_lowmem._src.optim.step import gpu

platform.no_gpu_reason = lambda: None
launch = gpu.launch
gpu.launch = lambda *args, backend: launch(*args, backend="interpret")
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", sys.argv[1] == "removed")
mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
sharding = NamedSharding(mesh, P("a"))
params = {"w": jax.ShapeDtypeStruct((64, 64), jnp.bfloat16, sharding=sharding)}
hits = []
jax.monitoring.register_event_listener(
    lambda event, **_: hits.append("hit") if event.endswith("/cache_hits")
    else hits.append("miss") if event.endswith("/cache_misses") else None
)
default = lowmem.Storage(policy=lowmem.Policy(min_size=0))
for change in ({}, {"rounding": "nearest"}, {"mu": lowmem.codecs.softsign_paper()},
               {"group_size": 16}):
    tx = lowmem.flash_adamw(1e-2, storage=dataclasses.replace(default, **change))
    state = jax.eval_shape(tx.init, params)
    of_state = lowmem.sharding.state_shardings(tx, params, {"w": sharding})
    state = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, of_state)
    step = jax.jit(functools.partial(lowmem.step, tx, implementation="pallas"))
    lowered = step.lower(params, state, params)
    hits.clear()
    lowered.compile()
    print(*hits)
"""


@pytest.mark.parametrize("flag", rows(["kept", "removed"], ["removed"]))
def test_persistent_cache(flag, tmp_path):
    """A second process finds every program, and none that steps in another way."""

    def run():
        flags = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
        env = os.environ | {
            "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "JAX_COMPILATION_CACHE_DIR": str(tmp_path)
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", CACHE, flag], capture_output=True, text=True, env=env
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    assert run() == ["miss"] * 4
    assert run() == ["hit"] * 4
