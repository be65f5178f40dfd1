"""A process of test_multiprocess.py: `multiprocess_worker.py FOLDER PORT INDEX PLATFORM`.

It has two CPU devices, or the GPU that it sees. Each process trains the same parameters twice, on
one device of its own and sharded over the devices of all, compares what it holds, saves, and
restores to another layout. A failed check ends it.
"""

import contextlib
import functools
import sys
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lowmem as lowmem
from optax_lowmem import checkpoint
from optax_lowmem._src.kernels import platform
from optax_lowmem._src.optim.step import gpu
from optax_lowmem.sharding import state_shardings
from tests.compilation import SAME_BITS

PROCESSES, STEPS = 2, 10
DEVICES = {"cpu": 2, "cuda": 1}  # of a process
SHAPES = {"embed": (128, 96), "layers": (4, 64, 128), "norm": (64,)}
FSDP = {"embed": P("fsdp"), "layers": P(None, None, "fsdp"), "norm": P("fsdp")}
OTHER = {"embed": P("a", "b"), "layers": P(("b", "a")), "norm": P()}


def start(port, index, platform):
    jax.config.update("jax_platforms", platform)
    if platform == "cpu":
        jax.config.update("jax_num_cpu_devices", DEVICES[platform])
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"localhost:{port}", PROCESSES, index, initialization_timeout=60,
        heartbeat_timeout_seconds=30,
    )  # fmt: skip
    assert (jax.process_count(), jax.local_device_count()) == (PROCESSES, DEVICES[platform])
    assert jax.device_count() == PROCESSES * DEVICES[platform]


def options():
    return SAME_BITS if jax.default_backend() == "cpu" else None


def mesh_of(**axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def gradients(steps=STEPS):
    rng = np.random.default_rng(1)
    return {
        name: rng.normal(0, 1e-3, (steps, *shape)).astype(jnp.bfloat16)
        for name, shape in SHAPES.items()
    }


def masters():
    rng = np.random.default_rng(0)
    return {name: rng.normal(0, 0.2, shape).astype(np.float32) for name, shape in SHAPES.items()}


def training(tx, shardings=None):
    """`STEPS` steps, as one program."""

    def run(params, state, grads):
        def one(carry, g):
            return lowmem.step(tx, g, *reversed(carry)), None

        return jax.lax.scan(one, (params, state), grads)[0]

    return jax.jit(run, out_shardings=shardings, compiler_options=options())


def stepped_by_kernel(tx, shardings, grads, start):
    """A step by the GPU's kernel, interpreted on a CPU: each device has that of its shards."""
    launch = gpu.launch
    with contextlib.ExitStack() as patched:
        if jax.default_backend() == "cpu":
            interpreted = lambda *args, backend: launch(*args, backend="interpret")  # noqa: E731
            patched.enter_context(mock.patch.object(platform, "no_gpu_reason", lambda: None))
            patched.enter_context(mock.patch.object(gpu, "launch", interpreted))
        step = functools.partial(lowmem.step, tx, implementation="pallas")
        jitted = jax.jit(step, out_shardings=shardings, compiler_options=options())
        return jitted(grads, start[1], start[0])


def spread(tree, shardings):
    """Arrays over the devices of all processes, from the same values in each."""

    def of(x, sharding):
        x = np.asarray(x)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(of, tree, shardings)


def check(found, wanted, shardings):
    """Every bit of every shard that this process holds."""
    rows = zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted),
        jax.tree.leaves(shardings), strict=True,
    )  # fmt: skip
    for (path, x), y, sharding in rows:
        name, y = jax.tree_util.keystr(path), np.asarray(y)
        assert (x.shape, x.dtype) == (y.shape, y.dtype), name
        assert x.sharding.is_equivalent_to(sharding, x.ndim), f"{name} lies as {x.sharding}"
        shards = x.addressable_shards
        assert len(shards) == jax.local_device_count(), name
        for shard in shards:
            here = np.asarray(shard.data)
            assert here.tobytes() == y[shard.index].tobytes(), f"{name} differs in {shard.index}"


def nearly(found, wanted):
    """The values wanted; on CPUs with JAX 0.12, those found if almost all are equal.

    There XLA contracts other multiply-adds of a part than of the whole.
    """
    if jax.default_backend() != "cpu" or jax.__version_info__ < (0, 12):
        return wanted
    gathered = multihost_utils.process_allgather(found, tiled=True)
    for one, other in zip(jax.tree.leaves(gathered), jax.tree.leaves(wanted), strict=True):
        assert np.mean(np.asarray(one) != np.asarray(other)) <= 0.01
    return jax.tree.map(np.asarray, gathered)


def main(folder, port, index, platform):
    start(port, index, platform)
    tx = lowmem.flash_adamw(1e-2)
    assert tx.engine.storage.rounding == "stochastic"
    params, state = lowmem.init(tx, {k: jnp.asarray(v) for k, v in masters().items()})
    wanted = jax.tree.map(np.asarray, training(tx)(params, state, gradients()))
    assert not np.array_equal(wanted[0]["embed"], params["embed"])

    mesh = mesh_of(fsdp=jax.device_count())
    of_params = {name: NamedSharding(mesh, spec) for name, spec in FSDP.items()}
    shardings = of_params, state_shardings(tx, params, of_params)
    assert shardings[1].mu_scale["embed"].spec == P("fsdp", None)
    replicated = dict.fromkeys(SHAPES, NamedSharding(mesh, P()))
    found = training(tx, shardings)(
        *spread((params, state), shardings), spread(gradients(), replicated)
    )
    wanted = nearly(found, wanted)
    check(found, wanted, shardings)
    grads = {name: g[0] for name, g in gradients(1).items()}
    found_next = stepped_by_kernel(tx, shardings, *spread((grads, wanted), (of_params, shardings)))
    wanted_next = nearly(found_next, stepped_by_kernel(tx, None, grads, wanted))
    check(found_next, wanted_next, shardings)
    print("trained", flush=True)

    checkpoint.save(folder, tx, *found, step=STEPS)
    multihost_utils.sync_global_devices("saved")
    other = mesh_of(a=2, b=jax.device_count() // 2)
    of_params = {name: NamedSharding(other, spec) for name, spec in OTHER.items()}
    shardings = of_params, state_shardings(tx, params, of_params)
    like = {
        name: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=of_params[name])
        for name, p in params.items()
    }
    assert checkpoint.latest_step(folder) == STEPS
    restored = checkpoint.restore(folder, tx, like, shardings=shardings[1])
    check(restored, wanted, shardings)
    print("restored", flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
