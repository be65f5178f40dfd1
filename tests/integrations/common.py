"""What every framework's script does: train 30 steps on two devices, compare, record.

A script runs in an environment of its own: `make test-frameworks`. It imports this module first,
since JAX reads the number of devices once.
"""

import argparse
import math
import os
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from benchmarks.records import keep, records_of, show  # noqa: E402

DEVICES, STEPS, RATE = 2, 30, 1e-3
jax.config.update("jax_num_cpu_devices", DEVICES)
PLAIN, OURS, OURS_BF16 = "its AdamW, f32", "flash_adamw, f32 weights", "flash_adamw, bf16 weights"
DTYPES = {PLAIN: jnp.float32, OURS: jnp.float32, OURS_BF16: jnp.bfloat16}


def tokens(batch: int, length: int, vocabulary: int) -> np.ndarray:
    """Return arithmetic sequences, which a small model learns in a few steps."""
    rng = np.random.default_rng(0)
    first, step = rng.integers(0, vocabulary, (batch, 1)), rng.integers(1, 9, (batch, 1))
    return ((first + step * np.arange(length)) % vocabulary).astype(np.int32)


def bytes_on_first_device(tree: Any) -> int:
    """Return the bytes that arrays, deleted ones too, have on the first device."""
    first = jax.devices()[0]
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
        if first in leaf.sharding.device_set
    )


def assert_same_bits(one: Any, other: Any) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def compare(package: str, train: Callable[[str], tuple[list[float], Any, int]]) -> None:
    """Train with each of `DTYPES`; fail unless ours ends at the loss of the framework's AdamW.

    Args:
      package: name of the framework on the index.
      train: name of a row -> losses; weights and state; number of parameters.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--record", type=Path, help="append records to this file")
    to = parser.parse_args().record
    case, ends = f"{package} {metadata.version(package)}", {}
    for impl in DTYPES:
        losses, arrays, size = train(impl)
        assert len(losses) == STEPS and np.isfinite(losses).all(), losses
        ends[impl] = np.mean(losses[-3:])
        per_device = bytes_on_first_device(arrays) / size
        values = {"first_loss": (losses[0], None), "loss": (ends[impl], None),
                  "bytes_per_parameter": (per_device, "B")}  # fmt: skip
        rows = records_of("frameworks", case, impl, values, devices=DEVICES)
        show(rows)
        keep(rows, to)
        assert ends[impl] < 0.8 * losses[0], "it does not learn"
    for impl in OURS, OURS_BF16:
        np.testing.assert_allclose(ends[impl], ends[PLAIN], rtol=0.05, err_msg=impl)
