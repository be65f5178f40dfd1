"""Loss spikes of AdamW, and what lower b2, gradient clipping and StableAdamW do about them.

A small vision transformer, whose data changes now and then, is trained at every point of a grid.
On a GPU all points take minutes; on a CPU take a part, such as `--only stable_adamw --seeds 1`.
notebooks/stable_adamw.ipynb trains a smaller one.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lowmem as lowmem
from benchmarks import records
from benchmarks.claims.stable_adamw import (
    ADAMW,
    B2,
    B2S,
    BATCH,
    BATCHES,
    CLIPPED,
    RATE,
    RATES,
    STABLE,
    WIDTH,
    WIDTHS,
    point,
)
from benchmarks.style import BLUE, GREY, VERMILION, headline, plt
from optax_lowmem import diagnostics
from optax_lowmem._src.training.diagnostics.spikes import IGNORE, RMS_THRESHOLD

CURVES = records.RESULTS / "spikes.npz"
EMBEDDING, MIDDLE = "patch", "block1/qkv"  # the layer that predicts spikes, and the control
CLASSES, PATCHES, LAYERS, HEADS = 16, 4, 3, 2
CONTENT, TEXTURE, SOURCES = 32, 16, 12  # coefficients per patch: of all images, of each source
FEATURES = CONTENT + TEXTURE * SOURCES
# a new source of images comes every EVERY steps or so from FIRST on, and stays for LASTS steps
FIRST, EVERY, JITTER, LASTS = 1100, 240, 100, 12
NOISE, AMPLITUDE, SHARE = 3.0, 4.0, 0.5  # of the content, the texture, a source's part of a batch
EPS, WEIGHT_DECAY, WARMUP = 1e-6, 0.1, 500  # eps: the paper's
SEED = 0  # of the figure: stable_adamw has no spike with it

Points = list[tuple[float, float]]  # (learning rate, b2)


# ---- the data and the model ----------------------------------------------------------------------
def _key(seed: jax.Array | int, what: int) -> jax.Array:
    return jax.random.fold_in(jax.random.key(seed), what)


def arrivals(seed: jax.Array | int) -> jax.Array:
    """The first step of each source, in random places."""
    late = jax.random.randint(_key(seed, 1), (SOURCES,), 0, JITTER)
    return FIRST + EVERY * jnp.arange(SOURCES) + late


def batch_of(seed: jax.Array | int, step: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Images as (size, patches, coefficients), and their classes.

    The first coefficients of a patch are the class's content and noise. The others are zero, except
    in half of the images while a source is present: these have its texture, which is the same in
    all classes.
    """
    keys = jax.random.split(jax.random.fold_in(_key(seed, 2), step), 4)
    first = arrivals(seed)
    here = (step >= first) & (step < first + LASTS)
    classes = jax.random.randint(keys[0], (size,), 0, CLASSES)
    noise = jax.random.normal(keys[1], (size, PATCHES, CONTENT))
    content = jax.random.normal(_key(seed, 3), (CLASSES, PATCHES, CONTENT))[classes]
    textured = jax.random.uniform(keys[2], (size, 1, 1, 1)) < SHARE
    strength = AMPLITUDE * jax.random.uniform(keys[3], (size, 1, 1, 1), minval=0.5, maxval=1.5)
    signs = jax.random.rademacher(_key(seed, 4), (PATCHES, SOURCES, TEXTURE), jnp.float32)
    texture = jnp.where(textured, strength, 0) * signs[None] * here[None, None, :, None]
    rest = texture.reshape(size, PATCHES, SOURCES * TEXTURE)
    return jnp.concatenate([content + NOISE * noise, rest], axis=-1), classes


def start(seed: jax.Array | int, width: int) -> dict[str, Any]:
    """Weights with a standard deviation of 0.01 in the embedding, 1 / sqrt(fan-in) elsewhere."""
    keys = iter(jax.random.split(_key(seed, 0), 3 + 4 * LAYERS))

    def normal(rows: int, columns: int, scale: float | None = None) -> jax.Array:
        return jax.random.normal(next(keys), (rows, columns)) * (scale or rows**-0.5)

    params: dict[str, Any] = {
        "patch": normal(FEATURES, width, 0.01),
        "position": normal(PATCHES, width, 0.01),
        "head": normal(width, CLASSES),
        "norms": jnp.ones((2 * LAYERS + 2, 1, width)),
    }
    residual = (2 * LAYERS) ** -0.5
    for i in range(LAYERS):
        params[f"block{i}"] = {
            "qkv": normal(width, 3 * width),
            "out": normal(width, width, residual * width**-0.5),
            "up": normal(width, 4 * width),
            "down": normal(4 * width, width, residual * (4 * width) ** -0.5),
        }
    return params


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5) * scale[None]


def loss_of(params: dict[str, Any], images: jax.Array, classes: jax.Array) -> jax.Array:
    """Mean cross-entropy of a pre-norm transformer, with CLIP's norm after the embedding."""
    norms = iter(params["norms"])
    x = _norm(images @ params["patch"] + params["position"][None], next(norms))
    for i in range(LAYERS):
        block = params[f"block{i}"]
        qkv = (_norm(x, next(norms)) @ block["qkv"]).reshape(*x.shape[:2], 3, HEADS, -1)
        mixed = jax.nn.dot_product_attention(*(qkv[:, :, part] for part in range(3)))
        x = x + mixed.reshape(x.shape) @ block["out"]
        x = x + jax.nn.gelu(_norm(x, next(norms)) @ block["up"]) @ block["down"]
    logits = _norm(x, next(norms)).mean(1) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, classes).mean()


# ---- training ------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Run:
    """Settings of a program; learning rate, b2 and seed are its arguments."""

    optimizer: str = ADAMW
    batch: int = BATCH
    width: int = WIDTH
    steps: int = 4000


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    ADAMW: optax.adamw,
    STABLE: lowmem.stable_adamw,
    CLIPPED: optax.adamw,
    "flash_adamw": lowmem.flash_adamw,
}


def grid(steps: int) -> Iterator[tuple[Run, Points]]:
    """Yield each program with its points."""
    every_b2: Points = [(RATE, b2) for b2 in B2S]
    high: Points = [(RATE, b2) for b2 in B2S[1:]]
    yield Run(steps=steps), every_b2 + [(rate, b2) for rate in RATES for b2 in B2S[1:]]
    yield Run(STABLE, steps=steps), every_b2
    yield Run(CLIPPED, steps=steps), every_b2
    yield Run("flash_adamw", steps=steps), [(RATE, B2)]
    yield from ((Run(batch=batch, steps=steps), high) for batch in BATCHES)
    yield from ((Run(width=width, steps=steps), high) for width in WIDTHS)


def losses_and_rms(run: Run, rate: Any, b2: Any, seed: Any) -> tuple[jax.Array, ...]:
    """Loss, and RMS_t of the embedding and of a middle layer, at every step."""
    warm = lambda count: rate * jnp.minimum(1.0, (count + 1) / WARMUP)  # noqa: E731
    tx = OPTIMIZERS[run.optimizer](warm, b2=b2, eps=EPS, weight_decay=WEIGHT_DECAY)
    clip = optax.clip_by_global_norm(1.0) if run.optimizer == CLIPPED else optax.identity()

    def step(carry: Any, index: jax.Array) -> tuple[Any, tuple[jax.Array, ...]]:
        params, state = carry
        loss, grads = jax.value_and_grad(loss_of)(params, *batch_of(seed, index, run.batch))
        grads, _ = clip.update(grads, clip.init(params))
        updates, state = tx.update(grads, state, params)
        leaves = (EMBEDDING, MIDDLE)
        found = diagnostics.rms(grads, state, b2=b2, eps=EPS, leaves=leaves)
        carry = optax.apply_updates(params, updates), state
        return carry, (loss, found[EMBEDDING], found[MIDDLE])

    params = start(seed, run.width)
    return jax.lax.scan(step, (params, tx.init(params)), jnp.arange(run.steps))[1]


@functools.partial(jax.jit, static_argnames="run")
def many(run: Run, rates: jax.Array, b2s: jax.Array, seeds: jax.Array) -> tuple[jax.Array, ...]:
    """`losses_and_rms` of every point and seed: arrays (points, seeds, steps)."""
    each_seed = jax.vmap(functools.partial(losses_and_rms, run), (None, None, 0))
    return jax.vmap(each_seed, (0, 0, None))(rates, b2s, seeds)


def trained(run: Run, points: Points, seeds: int) -> dict[str, np.ndarray]:
    """Optimizer and point -> curves, (loss, embedding[, middle]) x seeds x steps, in f16."""
    rates, b2s = (jnp.asarray(column, jnp.float32) for column in zip(*points, strict=True))
    found = np.stack(jax.device_get(many(run, rates, b2s, jnp.arange(seeds)))).astype(np.float16)
    curves = {}
    for at, (rate, b2) in enumerate(points):
        main = (rate, run.batch, run.width) == (RATE, BATCH, WIDTH)
        name = f"{run.optimizer}/{point(b2, rate, run.batch, run.width)}"
        curves[name] = found[: 3 if main else 2, at]
    return curves


# ---- spikes --------------------------------------------------------------------------------------
def stored() -> dict[str, np.ndarray]:
    """Read what `trained` returned of all points."""
    with np.load(CURVES) as file:
        return {name: file[name].astype(np.float64) for name in file.files}


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
        for at in np.asarray(arrivals(seed))
    ]
    return float(np.mean(rises))


def summary(name: str, curves: np.ndarray) -> records.Rows:
    """Records of one point: its spikes over all seeds, what predicts them, its loss."""
    impl, _, where = name.partition("/")
    loss, *layers = curves.astype(np.float64)
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
    more = {"seeds": len(loss), "steps": loss.shape[1]}
    return records.records_of("spikes", where, impl, floats, **more)


@records.suite(
    only={"nargs": "+", "choices": tuple(OPTIMIZERS), "default": tuple(OPTIMIZERS)},
    seeds={"type": int, "default": 4},
    steps={"type": int, "default": 4000},
    curves={"type": Path, "help": f"keep the curves in a file; those of docs/: {CURVES.name}"},
)
def main(args: argparse.Namespace) -> Iterator[records.Rows]:
    kept: dict[str, np.ndarray] = {}
    for program, points in grid(args.steps):
        if program.optimizer in args.only:
            found = trained(program, points, args.seeds)
            kept |= found
            yield from (summary(*one) for one in found.items())
    if args.curves:
        np.savez_compressed(args.curves, **kept)


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
