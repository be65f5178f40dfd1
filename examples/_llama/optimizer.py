"""Optimizers by name, for a Llama."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax
from _gpt.config import hidden, warmup_cosine

import optax_lowmem as lowmem
from optax_lowmem.gaussws.parts import chooser

from .config import PLAIN, SPLIT, Settings
from .model import is_norm

NAMES = (*lowmem.OPTIMIZERS, PLAIN, SPLIT)
# AdamW's peak times this
RATE_FACTORS = {name: record.rate_factor for name, record in lowmem.OPTIMIZERS.items()}
_DECAY = 0.1
_DECAYS = {"flash_lion": 0.3, "flash_sgd": 1e-4}


def _arguments(settings: Settings, weight_decay: float | None, decay_all: bool) -> dict[str, Any]:
    name, shape = settings.optimizer, settings.shape
    record = lowmem.OPTIMIZERS["flash_adamw" if name in (PLAIN, SPLIT) else name]
    decay = _DECAYS.get(name, _DECAY) if weight_decay is None else weight_decay
    known: dict[str, Any] = {
        "weight_decay": decay,
        "mask": None if decay_all else lowmem.blocks.decay_mask,
        "adam_weight_decay": decay if decay_all else 0.0,  # Muon's, of all but the matrices
        "muon_weight_dimension_numbers": hidden,
        "adam_b2": 0.95,
        "blocks": lowmem.blocks.Structure(heads=shape.heads, kv_heads=shape.kv_heads),
    }
    if any(slot.name == "nu" for slot in record.rule.slots):  # Lion's b1 and b2 are others
        known |= {"b1": 0.9, "b2": 0.95}
    return record.chosen(known)


def _maker(name: str) -> Callable[..., optax.GradientTransformation]:
    if name == SPLIT:
        return functools.partial(lowmem.flash_adamw, storage=lowmem.Storage.full_precision())
    return optax.adamw if name == PLAIN else lowmem.OPTIMIZERS[name].make


def make_optimizer(
    settings: Settings,
    schedule: optax.Schedule | None = None,
    weight_decay: float | None = None,
    decay_all: bool = False,
) -> optax.GradientTransformation:
    """Return the optimizer, inside the noise and after clipping, where the run has them.

    By default the schedule is a cosine, and the weight decay that of training from scratch.
    """
    schedule = schedule or warmup_cosine(settings.learning_rate, settings.steps)
    plain = settings.optimizer == PLAIN
    tx = _maker(settings.optimizer)(schedule, **_arguments(settings, weight_decay, decay_all))
    if settings.noise:
        # optax.adamw splits no master weights: f32 ones are kept beside what the loss sees
        more = {"clean_dtype": "float32"} if plain else {}
        tx = lowmem.gaussws_noise(tx, settings.noise, **more)
    if not settings.clip:
        return tx
    chain = optax.chain if plain and not settings.noise else lowmem.chain
    return chain(optax.clip_by_global_norm(settings.clip), tx)


def stored_dtype(optimizer: str, path: str, noise: str | None = None) -> Any:
    """Weights are bf16 with their other bits in the state; norms are f32, and all for optax.

    With noise, optax's are bf16 too: their f32 ones are in the state.
    """
    sampled = noise is not None and chooser(noise)(path, None)
    return jnp.float32 if is_norm(path) or (optimizer == PLAIN and not sampled) else jnp.bfloat16


def weights_dtype(settings: Settings, path: str) -> Any:
    """Return the dtype of a weight of a run."""
    if settings.f32_weights:
        return jnp.float32
    return stored_dtype(settings.optimizer, path, settings.noise)
