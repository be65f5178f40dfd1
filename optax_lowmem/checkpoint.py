"""Checkpoints of 8-bit state: saved, checked, restored, and turned to and from plain optax state.

Needs the extra `checkpoint` (orbax-checkpoint, safetensors, xxhash) where it writes or reads files.

    checkpoint.save("run", tx, params, state, step=100)
    params, state = checkpoint.restore("run", tx, jax.eval_shape(lambda p: p, params))

Arrays alone do not say how to read them: codes of `sqrt()` and of `linear(signed=False)` are uint8
with f32 scales both. A description of the format is saved with them and compared on the way back.
"""

from optax_lowmem._src.checkpoint.description import FORMAT_VERSION as FORMAT_VERSION
from optax_lowmem._src.checkpoint.description import check as check
from optax_lowmem._src.checkpoint.description import metadata as metadata
from optax_lowmem._src.checkpoint.export import export as export
from optax_lowmem._src.checkpoint.files import handlers as handlers
from optax_lowmem._src.checkpoint.plain import from_optax as from_optax
from optax_lowmem._src.checkpoint.plain import to_optax as to_optax
from optax_lowmem._src.checkpoint.store import args as args
from optax_lowmem._src.checkpoint.store import latest_step as latest_step
from optax_lowmem._src.checkpoint.store import restore as restore
from optax_lowmem._src.checkpoint.store import restore_from as restore_from
from optax_lowmem._src.checkpoint.store import save as save

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
