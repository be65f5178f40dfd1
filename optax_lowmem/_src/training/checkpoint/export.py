"""Export weights without optimizer state, for inference."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from optax_lowmem._src.arrays import numerics, trees
from optax_lowmem._src.arrays.hyperparameters import check_choice
from optax_lowmem._src.optim.step.masters import clean_params, master_params
from optax_lowmem._src.training.checkpoint import files
from optax_lowmem._src.training.checkpoint.files import StrPath

_FORMATS = ("safetensors", "orbax")


def export(
    path: StrPath, params: optax.Params, state: optax.OptState, dtype: DTypeLike = jnp.float32, *,
    format: str = "safetensors",
) -> None:  # fmt: skip
    """Write the weights without the optimizer state: the f32 master weights, or bf16 weights.

    Args:
      path: the file (safetensors) or directory (Orbax) to write.
      params: the weights.
      state: the optimizer's state, whose corrections complete the master weights.
      dtype: float32, or bfloat16, which writes bf16 weights unchanged and rounds others to nearest.
      format: `safetensors`, one file whose names are leaf paths joined by dots; or `orbax`, the
        tree as a `StandardCheckpointer` saves it.

    Raises:
      ImportError: if the package that writes the format is missing.
      TypeError: for another dtype.
      ValueError: for another format, or if two leaves have the same name.

    Memory: safetensors holds all weights in host memory while it writes.

    Example:
      >>> import jax.numpy as jnp, os, tempfile, optax_lowmem as lowmem
      >>> params, state = lowmem.init(lowmem.flash_adamw(1e-3), {"w": jnp.full((64, 64), 0.1)})
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = os.path.join(folder, "model.safetensors")
      ...     lowmem.checkpoint.export(path, params, state)
      ...     os.path.getsize(path) > 4 * 64 * 64
      True
    """
    kind = jnp.dtype(dtype)
    if kind not in (jnp.float32, jnp.bfloat16):
        raise TypeError(f"weights are exported in float32 or bfloat16, not {kind}")
    check_choice("format", format, _FORMATS)
    names = [name for name, _ in trees.named_leaves(params, _dotted, "in the file")]
    masters, params = master_params(params, state), clean_params(params, state)
    weights = jax.tree.map(lambda p, w: p if p.dtype == kind else _cast(w, kind), params, masters)
    if format == "safetensors":
        _write_safetensors(path, dict(zip(names, jax.tree.leaves(weights), strict=True)))
    else:
        with files.orbax().StandardCheckpointer() as checkpointer:
            checkpointer.save(files.absolute(path), weights)


def _dotted(path: tuple[object, ...]) -> str:
    return trees.path_name(path).replace("/", ".")


def _cast(w: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return numerics.widen(w) if dtype == jnp.float32 else numerics.narrow(w, dtype)


def _write_safetensors(path: StrPath, weights: dict[str, jax.Array]) -> None:
    try:
        from safetensors.numpy import save_file
    except ModuleNotFoundError as error:
        raise ImportError(
            "format='safetensors' needs safetensors: pip install safetensors", name="safetensors"
        ) from error
    arrays = {  # ascontiguousarray makes 0-d arrays 1-d
        name: np.ascontiguousarray(jax.device_get(leaf)).reshape(leaf.shape)
        for name, leaf in weights.items()
    }
    save_file(arrays, os.fspath(path), metadata={"format": "jax"})
