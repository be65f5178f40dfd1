"""Trains a convnet on scikit-learn's digits: optax.sgd in f32, and flash_sgd on bf16 weights.

    python examples/train_digits.py --seeds 1      # under a minute on 2 CPU cores
    python examples/train_digits.py --record FILE  # 10 seeds; a minute or two on a GPU

Both start from the same weights and see the same shifted images in the same order, so that their
results pair up by seed. A whole run is one jitted scan.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _gpt.arguments import (
    add_common,
    compute_dtype,
    positive,
    progress_bar,
    records_of_examples,
)
from _gpt.config import matrices
from _gpt.report import LABELS, device_name, mean_and_error
from _gpt.train import (
    F32,
    LOWMEM,
    bytes_by_slot,
    check_implementation,
    optimizer_step,
    stored_dtype,
)
from flax import linen as nn
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import optax_lowmem as lowmem

STEPS = 3_000
CLASSES, TRAIN_SHARE = 10, 0.8
PEAK, MOMENTUM, DECAY, SMOOTHING = 0.05, 0.9, 5e-4, 0.1
UNITS = {"val_loss": "nats", "val_accuracy": "%", "bytes_per_param": "bytes"}


@dataclass(frozen=True)
class Digits:
    """Images [n, 8, 8, 1] in [0, 1] and their classes [n]."""

    train: tuple[jax.Array, jax.Array]
    held_out: tuple[jax.Array, jax.Array]


class ConvNet(nn.Module):
    """Three convolutions and a hidden layer; computes in the dtype of its input."""

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.relu(nn.Conv(16, (3, 3), dtype=images.dtype)(images))
        x = nn.relu(nn.Conv(32, (3, 3), strides=2, dtype=images.dtype)(x))
        x = nn.relu(nn.Conv(64, (3, 3), strides=2, dtype=images.dtype)(x))
        x = nn.relu(nn.Dense(128, dtype=images.dtype)(x.reshape(len(x), -1)))
        return nn.Dense(CLASSES, dtype=images.dtype)(x).astype(jnp.float32)


def load() -> Digits:
    """The images, shuffled in a fixed order; a fifth is held out."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise SystemExit(
            "train_digits.py needs scikit-learn: pip install '.[examples]' in the clone"
        ) from None
    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    cut = int(TRAIN_SHARE * len(order))

    def part(chosen: np.ndarray) -> tuple[jax.Array, jax.Array]:
        images = found.images[chosen, ..., None].astype(np.float32) / 16
        return jnp.asarray(images), jnp.asarray(found.target[chosen])

    return Digits(part(order[:cut]), part(order[cut:]))


def shifted(key: jax.Array, images: jax.Array) -> jax.Array:
    """Each image moved by up to one pixel both ways."""
    padded = jnp.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    corners = jax.random.randint(key, (len(images), 2), 0, 3)
    cut = jax.vmap(lambda image, at: jax.lax.dynamic_slice(image, (*at, 0), images.shape[1:]))
    return cut(padded, corners)


def optimizer(impl: str, steps: int) -> optax.GradientTransformation:
    """SGD with Nesterov momentum and weight decay, either way."""
    warmup = max(1, steps // 20)
    rate = optax.warmup_cosine_decay_schedule(0.0, PEAK, warmup, max(warmup + 1, steps))
    if impl == LOWMEM:
        return lowmem.flash_sgd(rate, MOMENTUM, True, weight_decay=DECAY, mask=matrices)
    decay = optax.add_decayed_weights(DECAY, matrices)
    return optax.chain(decay, optax.sgd(rate, MOMENTUM, nesterov=True))


def start(impl: str, tx: optax.GradientTransformation, seed: int) -> tuple[Any, Any]:
    """Weights and state."""
    weights = ConvNet().init(jax.random.key(seed), jnp.zeros((1, 8, 8, 1)))["params"]
    if impl == LOWMEM:
        return lowmem.init(tx, weights, dtype=stored_dtype, seed=seed)
    return weights, tx.init(weights)


def trainer(
    impl: str, tx: optax.GradientTransformation, digits: Digits, args: argparse.Namespace
) -> Callable[[Any, Any, jax.Array], tuple[jax.Array, jax.Array]]:
    """From weights, state and a key to the loss and the accuracy on held-out images."""
    take_step = optimizer_step(impl, args.implementation)

    def logits(params: Any, images: jax.Array) -> jax.Array:
        return ConvNet().apply({"params": params}, images.astype(args.compute))

    def loss(params: Any, images: jax.Array, classes: jax.Array) -> jax.Array:
        wanted = optax.smooth_labels(jax.nn.one_hot(classes, CLASSES), SMOOTHING)
        return optax.softmax_cross_entropy(logits(params, images), wanted).mean()

    def body(carry: Any, key: jax.Array) -> tuple[Any, None]:
        params, state = carry
        images, classes = digits.train
        pick, shift = jax.random.split(key)
        chosen = jax.random.randint(pick, (args.batch,), 0, len(images))
        grads = jax.grad(loss)(params, shifted(shift, images[chosen]), classes[chosen])
        return take_step(tx, grads, state, params), None

    @jax.jit
    def run(params: Any, state: Any, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        keys = jax.random.split(key, args.steps)
        (params, _), _ = jax.lax.scan(body, (params, state), keys)
        images, classes = digits.held_out
        found = logits(params, images)
        losses = optax.softmax_cross_entropy_with_integer_labels(found, classes)
        return losses.mean(), 100 * jnp.mean(found.argmax(-1) == classes)

    return run


def train(
    impl: str, digits: Digits, args: argparse.Namespace, progress: Progress, task: Any
) -> list[dict[str, float]]:
    """The metrics of every seed; a run is one program, so progress is told by runs."""
    tx = optimizer(impl, args.steps)
    run, found = trainer(impl, tx, digits, args), []
    for seed in range(args.seed, args.seed + args.seeds):
        progress.update(task, now=f"{LABELS[impl]}, seed {seed}")
        params, state = start(impl, tx, seed)
        count = sum(p.size for p in jax.tree.leaves(params))
        size = bytes_by_slot(tx, params)["total"] / count
        loss, accuracy = run(params, state, jax.random.fold_in(jax.random.key(seed), 1))
        values = (float(loss), float(accuracy), size)
        found.append({**dict(zip(UNITS, values, strict=True)), "parameters": count})
        progress.update(task, advance=1, now=f"{LABELS[impl]}, seed {seed}: {accuracy:.2f} %")
    return found


def append(runs: dict[str, list[dict[str, float]]], args: argparse.Namespace) -> None:
    """Appends benchmark records to a file of JSON lines."""
    changed = "" if args.steps == STEPS else f" steps={args.steps}"
    case = f"digits-convnet{changed}/sgd"
    flags = {"steps": args.steps, "batch": args.batch, "compute": args.compute}
    example_records = records_of_examples()
    records, recorded_as = example_records.records, example_records.recorded_as
    rows = [
        records.record("train", case, recorded_as(impl, args.implementation), metric, one[metric],
                       unit, seed=args.seed + index,
                       flags=flags | {"parameters": one["parameters"]})
        for impl, found in runs.items()
        for index, one in enumerate(found)
        for metric, unit in UNITS.items()
    ]  # fmt: skip
    records.append(rows, args.record)


def table(runs: dict[str, list[dict[str, float]]]) -> Table:
    """Means over seeds with their standard errors, and the paired difference."""
    shown = Table("", *(LABELS[impl] for impl in runs), "difference")
    for metric, unit in UNITS.items():
        columns = [np.array([one[metric] for one in found]) for found in runs.values()]
        columns.append(columns[1] - columns[0])
        cells = []
        for values in columns:
            mean, error = mean_and_error(values.tolist())
            cells.append(f"{mean:.4f}" + ("" if error is None else f" ± {error:.4f}"))
        shown.add_row(f"{metric}, {unit}", *cells)
    return shown


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=positive, default=STEPS, help=f"default: {STEPS}")
    add("--batch", type=positive, default=32, help="images in a batch (default: 32)")
    add("--seeds", type=positive, default=10, help="how many seeds to repeat over (default: 10)")
    add_common(add)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    args.compute = compute_dtype(args.compute)
    check_implementation(args.implementation)
    console, digits, begin = Console(), load(), time.perf_counter()
    with progress_bar("runs", console=console) as progress:
        task = progress.add_task("", total=2 * args.seeds, now="")
        runs = {impl: train(impl, digits, args, progress, task) for impl in (F32, LOWMEM)}
    if args.record:
        append(runs, args)
    console.print(table(runs))
    parameters = runs[F32][0]["parameters"]
    console.print(
        f"{parameters:,} weights, {args.steps} steps, {args.seeds} seed{'s' * (args.seeds > 1)} in "
        f"{time.perf_counter() - begin:.0f} s on {device_name()}",
        highlight=False,
    )


if __name__ == "__main__":
    main()
