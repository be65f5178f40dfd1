"""Device time of an optimizer step, update and apply, looped on the device in one jit.

python -m benchmarks.bench_step --leaf-set ten-million --record
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lowmem as lowmem
from benchmarks import records

LEAF_SETS: dict[str, dict[str, tuple[int, ...]]] = {
    "ten-million": {f"w{i}": (1024, 2560) for i in range(4)},
    "one-ten-million": {"w": (4096, 2560)},
    "demo-gpt": {
        "embed": (256, 128),
        **{
            f"block{i}/{n}": s
            for i in range(4)
            for n, s in (
                ("qkv", (128, 384)),
                ("proj", (128, 128)),
                ("up", (128, 512)),
                ("down", (512, 128)),
                ("scale", (128,)),
                ("bias", (512,)),
            )
        },
    },
}
OPTIMIZERS: dict[str, tuple[Callable, Callable]] = {
    "adamw": (
        lambda **o: lowmem.flash_adamw(1e-3, weight_decay=0.1, **o),
        lambda: optax.adamw(1e-3, weight_decay=0.1),
    ),
    "lion": (
        lambda **o: lowmem.flash_lion(1e-4, weight_decay=0.1, **o),
        lambda: optax.lion(1e-4, weight_decay=0.1),
    ),
    "sgd": (
        lambda **o: lowmem.flash_sgd(1e-2, momentum=0.9, **o),
        lambda: optax.sgd(1e-2, momentum=0.9),
    ),
}


def tree(leaf_set: str, scale: float, seed: int) -> dict[str, jax.Array]:
    """f32 arrays of a leaf set."""
    rng = np.random.default_rng(seed)
    shapes = LEAF_SETS[leaf_set]
    return {n: jnp.asarray(rng.normal(0, scale, s), jnp.float32) for n, s in shapes.items()}


def variants(optimizer: str) -> dict[str, tuple[Any, Any, Any]]:
    """Implementation -> (transformation, dtype of weights, dtype of gradients)."""
    ours, plain = OPTIMIZERS[optimizer]
    nearest = lowmem.Storage(rounding="nearest")
    return {
        "optax-f32": (plain(), jnp.float32, jnp.float32),
        "lowmem.update": (ours(), jnp.bfloat16, jnp.bfloat16),
        "lowmem.update-nearest": (ours(storage=nearest), jnp.bfloat16, jnp.bfloat16),
    }


def looped(tx: optax.GradientTransformation, steps: int) -> Callable:
    """`steps` steps in one jit; the gradient is carried, so nothing of it can be hoisted out."""

    def body(_: jax.Array, carry: tuple) -> tuple:
        params, state, grads = carry
        params, state = lowmem.step(tx, grads, state, params)
        return params, state, grads

    def run(carry: tuple) -> tuple:
        return jax.lax.fori_loop(0, steps, body, carry)

    return jax.jit(run, donate_argnums=0)


class Runner:
    """A compiled loop and its buffers."""

    def __init__(self, variant: tuple[Any, Any, Any], leaf_set: str, steps: int) -> None:
        tx, weights, gradients = variant
        params, state = lowmem.init(tx, tree(leaf_set, 0.02, 0), weights)
        grads = jax.tree.map(lambda g: g.astype(gradients), tree(leaf_set, 1e-3, 1))
        self.steps = steps
        self.carry = (params, state, grads)
        started = time.perf_counter()
        self.loop = looped(tx, steps).lower(self.carry).compile()
        self.compile_s = time.perf_counter() - started
        self.time()

    def time(self) -> float:
        """Milliseconds a step of one run."""
        started = time.perf_counter()
        self.carry = jax.block_until_ready(self.loop(self.carry))
        return (time.perf_counter() - started) / self.steps * 1e3


def measure(leaf_set: str, optimizer: str, steps: int, repeats: int) -> list[dict[str, Any]]:
    """Records of one case, its implementations interleaved."""
    runners = {n: Runner(v, leaf_set, steps) for n, v in variants(optimizer).items()}
    times: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(repeats):
        for name, runner in runners.items():
            times[name].append(runner.time())
    case = f"{leaf_set}/{optimizer}"
    base = min(times["optax-f32"])
    rows = []
    for name, runner in runners.items():
        best = min(times[name])
        more = {"median": statistics.median(times[name]), "ratio_to_optax": best / base}
        rows.append(records.record("step", case, name, "device_ms", best, "ms", **more))
        ratio = runner.compile_s / runners["optax-f32"].compile_s
        rows.append(
            records.record(
                "step", case, name, "compile_s", runner.compile_s, "s", ratio_to_optax=ratio
            )
        )
    return rows


def main() -> None:
    """Measures and prints; `--record` also stores."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--leaf-set", nargs="+", default=["ten-million"], choices=LEAF_SETS)
    parser.add_argument("--optimizer", nargs="+", default=["adamw"], choices=OPTIMIZERS)
    parser.add_argument("--steps", type=int, default=5, help="steps in one jit")
    parser.add_argument("--repeats", type=int, default=9, help="interleaved runs")
    parser.add_argument("--record", action="store_true", help="append to benchmarks/results")
    args = parser.parse_args()
    rows = []
    for leaf_set in args.leaf_set:
        for optimizer in args.optimizer:
            rows += measure(leaf_set, optimizer, args.steps, args.repeats)
    for row in rows:
        ratio = f"{row['ratio_to_optax']:.2f} x optax"
        print(f"{row['case']:<24}{row['impl']:<24}{row['value']:>9.2f} {row['unit']:<4}{ratio}")
    if args.record:
        print(f"recorded in {records.append(rows)}")


if __name__ == "__main__":
    main()
