"""Save, check and restore 8-bit state, and convert it to and from plain optax state.

Writing and reading files needs the extra `checkpoint` (orbax-checkpoint, safetensors, xxhash).

    checkpoint.save("run", tx, params, state, step=100)
    params, state = checkpoint.restore("run", tx, jax.eval_shape(lambda p: p, params))

The arrays alone do not determine the format: `sqrt()` and `linear(signed=False)` both store uint8
codes with f32 scales. So `save` adds a description of the format, and `restore` compares it.
"""

from optax_lowmem._src.training.checkpoint.description import FORMAT_VERSION, check, metadata
from optax_lowmem._src.training.checkpoint.export import export
from optax_lowmem._src.training.checkpoint.files import handlers
from optax_lowmem._src.training.checkpoint.optax_conversion import from_optax, to_optax
from optax_lowmem._src.training.checkpoint.store import (
    args,
    latest_step,
    restore,
    restore_from,
    save,
)

__all__ = [
    "FORMAT_VERSION",
    "args",
    "check",
    "export",
    "from_optax",
    "handlers",
    "latest_step",
    "metadata",
    "restore",
    "restore_from",
    "save",
    "to_optax",
]
