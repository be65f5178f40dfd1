"""A small vision transformer whose data changes now and then, and the loss spikes that follow."""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lowmem as lowmem
from optax_lowmem import diagnostics

EMBEDDING, MIDDLE = "patch", "block1/qkv"  # the layer that predicts, and the control
EPS, WEIGHT_DECAY, WARMUP = 1e-6, 0.1, 500  # eps: the paper's
CLASSES, PATCHES, LAYERS, HEADS = 16, 4, 3, 2
CONTENT, TEXTURE, SOURCES = 32, 16, 12  # coefficients of a patch: of every image, of each source
FEATURES = CONTENT + TEXTURE * SOURCES
FIRST, EVERY, JITTER, LASTS = 1100, 240, 100, 12  # steps: when a new source comes, for how long
NOISE, AMPLITUDE, SHARE = 3.0, 4.0, 0.5  # of the content, the texture, a source's part of a batch


@dataclasses.dataclass(frozen=True)
class Run:
    """Settings of a training run that are not mapped; learning rate, b2 and seed are arrays.

    Attributes:
      optimizer: a name in `OPTIMIZERS`.
      batch: images a step.
      width: of the transformer.
      steps: of training.
    """

    optimizer: str = "adamw"
    batch: int = 512
    width: int = 32
    steps: int = 4000


def _adamw(rate: Any, b2: Any) -> Any:
    return optax.adamw(rate, b2=b2, eps=EPS, weight_decay=WEIGHT_DECAY)


def _gradient_clipped(rate: Any, b2: Any) -> Any:
    return optax.chain(optax.clip_by_global_norm(1.0), _adamw(rate, b2))


def _flash(rate: Any, b2: Any) -> Any:
    return lowmem.flash_adamw(rate, b2=b2, eps=EPS, weight_decay=WEIGHT_DECAY)


def _stable(rate: Any, b2: Any) -> Any:
    return lowmem.stable_adamw(rate, b2=b2, eps=EPS, weight_decay=WEIGHT_DECAY)


OPTIMIZERS: dict[str, Callable[[Any, Any], Any]] = {
    "adamw": _adamw,
    "adamw, gradients clipped": _gradient_clipped,
    "flash_adamw": _flash,
    "stable_adamw": _stable,
}


# ---- The data -----------------------------------------------------------------------------------


def arrivals(seed: jax.Array | int) -> jax.Array:
    """The first step of each source: one every 240 steps or so, in random places."""
    late = jax.random.randint(_key(seed, 1), (SOURCES,), 0, JITTER)
    return FIRST + EVERY * jnp.arange(SOURCES) + late


def batch_of(seed: jax.Array | int, step: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Images as (size, patches, coefficients), and their classes.

    An image is its class's content and noise in the first coefficients of every patch; the others
    are zero but for the source that is there just now, half of whose images have a texture, the
    same in each up to its strength. A texture says nothing of the class.
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


def _key(seed: jax.Array | int, what: int) -> jax.Array:
    return jax.random.fold_in(jax.random.key(seed), what)


# ---- The model ----------------------------------------------------------------------------------


def start(seed: jax.Array | int, width: int) -> dict[str, Any]:
    """Weights: 0.01 for the embedding, one over the root of the fan-in for the others."""
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


def logits(params: dict[str, Any], images: jax.Array) -> jax.Array:
    """A pre-norm transformer, with a norm after the patch embedding as CLIP has it."""
    norms = iter(params["norms"])
    x = _norm(images @ params["patch"] + params["position"][None], next(norms))
    for i in range(LAYERS):
        block = params[f"block{i}"]
        x = x + _attention(_norm(x, next(norms)) @ block["qkv"]) @ block["out"]
        x = x + jax.nn.gelu(_norm(x, next(norms)) @ block["up"]) @ block["down"]
    return _norm(x, next(norms)).mean(1) @ params["head"]


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5) * scale[None]


def _attention(qkv: jax.Array) -> jax.Array:
    q, k, v = (
        part.reshape(*part.shape[:2], HEADS, part.shape[-1] // HEADS)
        for part in jnp.split(qkv, 3, axis=-1)
    )
    scores = jnp.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)
    return mixed.reshape(*qkv.shape[:2], -1)


def loss_of(params: dict[str, Any], batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Mean cross-entropy."""
    images, classes = batch
    losses = optax.softmax_cross_entropy_with_integer_labels(logits(params, images), classes)
    return losses.mean()


# ---- Training -----------------------------------------------------------------------------------


def curves(run: Run, rate: Any, b2: Any, seed: Any, watch: bool = True) -> dict[str, jax.Array]:
    """Loss and, with `watch`, RMS_t of both layers at every step."""
    warm = lambda count: rate * jnp.minimum(1.0, (count + 1) / WARMUP)  # noqa: E731
    tx = OPTIMIZERS[run.optimizer](warm, b2)

    def step(carry: Any, index: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        params, state = carry
        loss, grads = jax.value_and_grad(loss_of)(params, batch_of(seed, index, run.batch))
        updates, state = tx.update(grads, state, params)
        seen = {"loss": loss}
        if watch:
            leaves = (EMBEDDING, MIDDLE)
            found = diagnostics.rms(_given(run, grads), state, b2=b2, eps=EPS, leaves=leaves)
            seen |= {"embedding": found[EMBEDDING], "middle": found[MIDDLE]}
        return (optax.apply_updates(params, updates), state), seen

    params = start(seed, run.width)
    return jax.lax.scan(step, (params, tx.init(params)), jnp.arange(run.steps))[1]


def _given(run: Run, grads: Any) -> Any:
    """The gradients as AdamW gets them: RMS_t is of those that its second moment averages."""
    if "clipped" not in run.optimizer:
        return grads
    clip = optax.clip_by_global_norm(1.0)
    return clip.update(grads, clip.init(grads))[0]


@functools.partial(jax.jit, static_argnames="run")
def many(run: Run, rates: jax.Array, b2s: jax.Array, seeds: jax.Array) -> dict[str, jax.Array]:
    """`curves` of every (rate, b2) and seed: arrays (points, seeds, steps)."""
    each_seed = jax.vmap(functools.partial(curves, run), (None, None, 0))
    return jax.vmap(each_seed, (0, 0, None))(rates, b2s, seeds)


# ---- Spikes of several seeds --------------------------------------------------------------------


def found_spikes(losses: np.ndarray) -> list[np.ndarray]:
    """Loss spikes of each seed."""
    return [diagnostics.loss_spikes(one) for one in losses]


def predicted(losses: np.ndarray, rms: np.ndarray) -> diagnostics.Prediction:
    """`diagnostics.predicted` over seeds, (seeds, steps) each: their runs end to end."""
    ignore, steps = 1000, losses.shape[1]
    kept = steps - ignore

    def joined(found: list[np.ndarray]) -> np.ndarray:
        return np.concatenate([one - ignore + i * kept for i, one in enumerate(found)])

    events = [diagnostics.rms_spikes(one) for one in rms]
    return diagnostics.predicted(
        joined(found_spikes(losses)), joined(events), kept * len(losses), ignore=0
    )


def since_change(steps: np.ndarray, seed: int) -> np.ndarray:
    """For each step, how long ago the last source came; negative before the first one."""
    first = np.asarray(arrivals(seed))
    return steps - first[np.maximum(np.searchsorted(first, steps, "right") - 1, 0)]


def rise(losses: np.ndarray, before: int = 100, after: int = 15) -> float:
    """Mean rise of the loss in the steps after a source comes: no threshold decides."""
    rises = [
        one[at + 1 : at + 1 + after].mean() - one[at - before : at].mean()
        for seed, one in enumerate(losses)
        for at in np.asarray(arrivals(seed))
    ]
    return float(np.mean(rises))


# ---- What watching costs ------------------------------------------------------------------------


def watching(steps: int, repeats: int, batch: int = 512, width: int = 64) -> dict[str, float]:
    """Measure the cost per step of RMS_t of both layers: shares of its operations and of its time.

    The time is the least of the repeats, with and without in turns.
    """
    run, least, operations = Run(batch=batch, width=width, steps=steps), {}, {}
    programs = {}
    for watch in (False, True):
        program = jax.jit(functools.partial(curves, run, watch=watch)).lower(0.005, 0.999, 0)
        programs[watch] = program.compile()
        operations[watch] = programs[watch].cost_analysis()["flops"]
    for _ in range(repeats):
        for watch, program in programs.items():
            began = time.perf_counter()
            jax.block_until_ready(program(0.005, 0.999, 0))
            least[watch] = min(least.get(watch, np.inf), time.perf_counter() - began)
    return {
        "operations": operations[True] / operations[False] - 1,
        "time": least[True] / least[False] - 1,
        "step_ms": 1e3 * least[False] / steps,
    }
