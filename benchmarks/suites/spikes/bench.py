"""Loss spikes of AdamW, and what lower b2, gradient clipping and StableAdamW do about them.

python -m benchmarks.run spikes --record

trains every point of the grid below with several seeds, minutes on a GPU, and stores their curves.
On a CPU take a part: `--only stable_adamw --seeds 1`.
"""

import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import records
from benchmarks.suites.spikes import runs

RATE, B2, BATCH, WIDTH = 0.005, 0.999, 512, 32
B2S, RATES = (0.9, 0.99, 0.999), (0.00125, 0.0025, 0.01)
BATCHES, WIDTHS = (128, 256, 1024), (16, 64)
CURVES = records.RESULTS / "spikes.npz"
NUMBERS = "/numbers"  # behind a point's name

Points = list[tuple[float, float]]  # (rate, b2)


def grid(steps: int) -> Iterator[tuple[runs.Run, Points]]:
    """Yield each run to train, one compilation each, with its points (learning rate, b2)."""

    def run(optimizer: str = "adamw", batch: int = BATCH, width: int = WIDTH) -> runs.Run:
        return runs.Run(optimizer, batch, width, steps)

    every_b2: Points = [(RATE, b2) for b2 in B2S]
    high: Points = [(RATE, b2) for b2 in B2S[1:]]
    yield run(), every_b2 + [(rate, b2) for rate in RATES for b2 in B2S[1:]]
    yield run("stable_adamw"), every_b2
    yield run("adamw, gradients clipped"), every_b2
    yield run("flash_adamw"), [(RATE, B2)]
    yield from ((run(batch=batch), high) for batch in BATCHES)
    yield from ((run(width=width), high) for width in WIDTHS)


def point(b2: float = B2, rate: float = RATE, batch: int = BATCH, width: int = WIDTH) -> str:
    """Name of a point, of its records and of its curves."""
    return f"b2={b2:g} rate={rate:g} batch={batch} width={width}"


def trained(run: runs.Run, points: Points, seeds: int, program: Any) -> dict[str, np.ndarray]:
    """Curves of each point, (loss, embedding[, middle]) x seeds x steps, in f16."""
    rates, b2s = (jnp.asarray(column, jnp.float32) for column in zip(*points, strict=True))
    found = jax.device_get(program(rates, b2s, jnp.arange(seeds)))
    curves = {}
    for i, (rate, b2) in enumerate(points):
        main = (rate, run.batch, run.width) == (RATE, BATCH, WIDTH)
        names = ("loss", "embedding", "middle")[: 3 if main else 2]
        stacked = np.stack([found[name][i] for name in names])
        name = point(b2, rate, run.batch, run.width)
        curves[f"{run.optimizer}/{name}"] = stacked.astype(np.float16)
    return curves


def compiled(run: runs.Run, points: Points, seeds: int) -> Any:
    shape = jax.ShapeDtypeStruct((len(points),), jnp.float32)
    lowered = runs.many.lower(run, shape, shape, jax.ShapeDtypeStruct((seeds,), jnp.int32))
    return lowered.compile()


def thinned(curves: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Curves that are drawn, and of every point its `NUMBERS`.

    They are its spikes, those that an RMS spike precedes, the mean rise of the loss after a change,
    and the last loss of each seed.
    """
    drawn = [f"adamw/{point(b2)}" for b2 in B2S[1:]] + [f"stable_adamw/{point()}"]
    stored = {name: curves[name] for name in drawn if name in curves}
    for name, of in curves.items():
        loss, rms = of[:2].astype(np.float64)
        found, last = runs.predicted(loss, rms), np.median(loss[:, -1000:], axis=-1)
        numbers = [found.spikes.size, found.follows.sum(), runs.rise(loss), *last]
        stored[name + NUMBERS] = np.array(numbers)
    return stored


def summary(name: str, curves: np.ndarray) -> Iterator[dict[str, Any]]:
    """Records of one point: its spikes over all seeds, what predicts them, its loss."""
    impl, _, where = name.partition("/")
    loss, *layers = curves.astype(np.float64)
    more = {"seeds": len(loss), "steps": loss.shape[1]}

    def made(metric: str, value: float, unit: str) -> dict[str, Any]:
        return records.record("spikes", where, impl, metric, float(value), unit, **more)

    for layer, rms in zip(("embedding", "middle"), layers, strict=False):
        found = runs.predicted(loss, rms)
        if layer == "embedding":
            yield made("loss_spikes", found.spikes.size, "spikes")
        yield made(f"{layer}_predicts", found.follows.sum(), "spikes")
        yield made(f"{layer}_flagged", found.flagged, "share")
        yield made(f"{layer}_chance", found.chance, "share")
        yield made(f"{layer}_p_value", found.p_value, "probability")
    yield made("last_loss", np.median(loss[:, -1000:]), "nats")


def main() -> int:
    parser = records.command_line(__doc__)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--only", nargs="*", help="optimizers")
    parser.add_argument("--jobs", type=int, default=9, help="compilations at once")
    parser.add_argument("--out", type=Path, default=CURVES, help="the curves")
    args = parser.parse_args()
    began, kept, rows, failed = time.time(), {}, [], 0
    todo = [job for job in grid(args.steps) if not args.only or job[0].optimizer in args.only]
    with ThreadPoolExecutor(args.jobs) as pool:
        programs = [pool.submit(compiled, *job, args.seeds) for job in todo]
        for (run, points), program in zip(todo, programs, strict=True):
            try:
                found = trained(run, points, args.seeds, program.result())
            except Exception:
                traceback.print_exc()
                failed += 1
                continue
            kept |= found
            rows += [row for item in found.items() for row in summary(*item)]
            args.out.parent.mkdir(parents=True, exist_ok=True)
            np.savez_compressed(args.out, **thinned(kept))
            print(f"{run}: after {time.time() - began:.0f} s", flush=True)
    records.show(rows)
    records.keep(rows, args.record)
    return int(failed > 0)
