"""The benchmark of noise: what it times is what it says, and what it records."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")

from benchmarks.suites.noise import bench as bench_noise  # noqa: E402
from benchmarks.suites.noise import training as noise_training  # noqa: E402
from optax_lowmem import gaussws  # noqa: E402
from optax_lowmem._src.noise.kernels import block_shape  # noqa: E402

SIZE = (64, 96)


def test_what_is_timed_is_equation_1():
    w = jax.random.normal(jax.random.key(0), SIZE)
    factor, key = jnp.full(block_shape(SIZE), 2.0**-5), jnp.uint32(3)
    wanted = gaussws.sample(w, 6.0, key)
    for name in ("gaussws", bench_noise.XLA):
        np.testing.assert_array_equal(bench_noise.forward(name)(w, factor, key), wanted)
    one = bench_noise.forward(bench_noise.NORMAL)(w, factor, key)
    top = np.abs(np.float32(w[:32, :32])).max()
    steps = (np.float32(one) - np.float32(w))[:32, :32] / (top * 2.0**-5)
    assert one.dtype == jnp.bfloat16
    np.testing.assert_allclose(steps, np.round(steps), atol=0.3)  # of bf16
    assert {-1, 0, 1} <= set(np.round(steps).ravel().astype(int)) <= {-3, -2, -1, 0, 1, 2, 3}


def test_noise_alone():
    key = jnp.uint32(3)
    r = bench_noise.alone("gaussws", SIZE)(key)
    assert r.dtype == jnp.bfloat16
    np.testing.assert_array_equal(gaussws.unpack(bench_noise.alone("gaussws-packed", SIZE)(key)), r)
    normal = bench_noise.alone(bench_noise.NORMAL, (256, 256))(key)
    assert normal.dtype == jnp.bfloat16 and abs(float(normal.astype(jnp.float32).std()) - 1) < 0.02


def test_every_run_has_other_noise():
    """Each pass of the timed loop has another key, so XLA cannot hoist the noise out of it."""
    looped = jax.jit(lambda n: bench_noise.Keyed._loop(lambda key: key, (jnp.uint32(5),), n))
    assert [int(looped(n)) for n in (1, 2, 7)] == [0, 1, 6]


@pytest.mark.parametrize("optimizer", noise_training.OPTIMIZERS)
def test_extra_bytes(optimizer):
    """From shapes: two bytes and 16 a block, of the matrices that have noise."""
    for name, least in (("gaussws[od]", 2), ("gaussws[all]", 2), ("no noise", 0)):
        run = noise_training.Run.__new__(noise_training.Run)
        run.optimizer, run.name = optimizer, name
        own = noise_training.PRESETS["60m"]
        run.model = noise_training.Llama(own.shape)
        run.tx = noise_training.make_optimizer(optimizer, name, own.shape)
        run.carry = jax.eval_shape(run._start)
        assert least <= run.extra_bytes <= (2.02 if least else 0)


@pytest.mark.full
def test_records(tmp_path):
    file = tmp_path / "records.jsonl"
    flags = (
        "--shapes 64x96 --repeats 1 --impl gaussws jax-normal --preset tiny --batch 1 "
        "--optimizers flash_adam_mini --variants"
    )
    names = ["no noise", "gaussws[all]"]
    with jax.numpy_rank_promotion("allow"):  # of the example's model
        bench_noise.main([*flags.split(), *names, "--record", str(file)])
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    found = {(row["bench"], row["impl"], row["metric"]) for row in rows}
    for impl in ("gaussws", "jax-normal"):
        assert {("noise", impl, "gelem_per_s"), ("noise", impl, "noise_gelem_per_s")} <= found
    assert {("train", name, "tokens_per_s") for name in names} <= found
    assert all(row["value"] > 0 for row in rows if row["metric"] not in ("overhead", "extra_bytes"))
