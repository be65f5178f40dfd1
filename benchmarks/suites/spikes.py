"""Loss spikes of AdamW, and what lower b2, gradient clipping and StableAdamW do about them.

`python -m benchmarks.run spikes` makes the records of the stored curves: of 4,000 steps of a small
vision transformer whose data changes now and then, with four seeds at every point of a grid.
notebooks/stable_adamw.ipynb trains it; the program of the grid is that of commit 706b8a8.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import records
from benchmarks.claims.stable_adamw import point
from benchmarks.style import BLUE, GREY, VERMILION, headline, plt
from optax_lowmem import diagnostics
from optax_lowmem.diagnostics.spikes import IGNORE, RMS_THRESHOLD

CURVES = records.RESULTS / "spikes.npz"
WHERE = {"device": "NVIDIA H100 80GB HBM3", "jax": "0.11.2", "commit": "706b8a8"}  # they are from
# the data's changes: a new source of images comes every EVERY steps or so from FIRST on
SOURCES, FIRST, EVERY, JITTER = 12, 1100, 240, 100
SEED = 0  # stable_adamw has no spike with it


def stored() -> dict[str, np.ndarray]:
    """Optimizer and point -> curves, (loss, RMS_t of the embedding[, middle]) x seeds x steps."""
    with np.load(CURVES) as file:
        return {name: file[name].astype(np.float64) for name in file.files}


def arrivals(seed: int) -> np.ndarray:
    """The first step of each source, in random places."""
    key = jax.random.fold_in(jax.random.key(seed), 1)
    late = jax.random.randint(key, (SOURCES,), 0, JITTER)
    return np.asarray(FIRST + EVERY * jnp.arange(SOURCES) + late)


def found_spikes(losses: np.ndarray) -> list[np.ndarray]:
    """Loss spikes of each seed."""
    return [diagnostics.loss_spikes(one) for one in losses]


def predicted(losses: np.ndarray, rms: np.ndarray) -> diagnostics.Prediction:
    """`diagnostics.predicted` over seeds, (seeds, steps) each: their runs end to end."""
    kept = losses.shape[1] - IGNORE

    def joined(found: list[np.ndarray]) -> np.ndarray:
        return np.concatenate([one - IGNORE + i * kept for i, one in enumerate(found)])

    events = [diagnostics.rms_spikes(one) for one in rms]
    of_loss = joined(found_spikes(losses))
    return diagnostics.predicted(of_loss, joined(events), kept * len(losses), ignore=0)


def rise(losses: np.ndarray, before: int = 100, after: int = 15) -> float:
    """Mean rise of the loss in the steps after a source comes: no threshold decides."""
    rises = [
        one[at + 1 : at + 1 + after].mean() - one[at - before : at].mean()
        for seed, one in enumerate(losses)
        for at in arrivals(seed)
    ]
    return float(np.mean(rises))


def summary(name: str, curves: np.ndarray) -> records.Rows:
    """Records of one point: its spikes over all seeds, what predicts them, its loss."""
    impl, _, where = name.partition("/")
    loss, *layers = curves
    values: dict[str, tuple[float, str]] = {}
    for layer, rms in zip(("embedding", "middle"), layers, strict=False):
        found = predicted(loss, rms)
        values.setdefault("loss_spikes", (found.spikes.size, "spikes"))
        values |= {
            f"{layer}_predicts": (found.follows.sum(), "spikes"),
            f"{layer}_flagged": (found.flagged, "share"),
            f"{layer}_chance": (found.chance, "share"),
            f"{layer}_p_value": (found.p_value, "probability"),
        }
    values["last_loss"] = np.median(loss[:, -1000:]), "nats"
    floats = {metric: (float(value), unit) for metric, (value, unit) in values.items()}
    more = {"seeds": len(loss), "steps": loss.shape[1]} | WHERE
    return records.records_of("spikes", where, impl, floats, **more)


@records.suite()
def main(args: argparse.Namespace) -> Iterator[records.Rows]:
    yield from (summary(*one) for one in stored().items())


def run() -> Any:
    every = stored()
    curves = {name: every[f"{name}/{point()}"] for name in ("adamw", "stable_adamw")}
    found = predicted(*curves["adamw"][:2])
    left = sum(one.size for one in found_spikes(curves["stable_adamw"][0]))
    fig, axes = plt.subplots(2, 1, figsize=(7.2, 4.6), sharex=True)
    steps = np.arange(curves["adamw"].shape[-1])[IGNORE:]
    for (name, of), color in zip(curves.items(), (VERMILION, BLUE), strict=True):
        for ax, one in zip(axes, of[:2, SEED, IGNORE:], strict=True):
            ax.plot(steps, one, color=color, lw=1.3 if name == "adamw" else 0.7)
    spikes = diagnostics.loss_spikes(curves["adamw"][0, SEED])
    top = curves["adamw"][0, SEED, IGNORE:].max()
    axes[0].plot(spikes, np.full(spikes.shape, 1.08 * top), "v", color=GREY, ms=5)
    axes[0].text(IGNORE, 1.15 * top, "loss spikes of AdamW:", size=8, color=GREY, va="bottom")
    axes[0].text(3150, 0.72 * top, "AdamW", color=VERMILION, size=9)
    axes[0].text(2700, 0.06 * top, "stable_adamw", color=BLUE, size=9)
    axes[0].set(ylim=(0, 1.3 * top), title="loss")
    axes[1].axhline(RMS_THRESHOLD, color=GREY, lw=1, ls="--")
    title = f"RMS of the patch embedding; dashed: an RMS spike, {RMS_THRESHOLD}"
    axes[1].set(xlabel="step", title=title)
    headline(fig, f"All {found.spikes.size} loss spikes of AdamW follow an RMS "
                  f"spike; update clipping leaves {left}")  # fmt: skip
    assert found.follows.all() and left < 3
    return fig


FIGURES = {"stable_adamw_run": run}
