"""Optimizers for JAX whose state takes a quarter of the memory, as optax transformations."""

import importlib.metadata as _metadata

from optax_lowmem import blocks, checkpoint, codecs, diagnostics, gaussws, memory, release, sharding
from optax_lowmem._src.kernels.step_arguments import implementations
from optax_lowmem._src.optim.optimizers import OPTIMIZERS
from optax_lowmem._src.optim.optimizers.adam import (
    b2_schedule,
    coat_adamw,
    flash_adam,
    flash_adamw,
    scale_by_flash_adam,
)
from optax_lowmem._src.optim.optimizers.adam_mini import (
    adam_mini,
    flash_adam_mini,
    q_adam_mini,
    q_adamw,
    scale_by_adam_mini,
)
from optax_lowmem._src.optim.optimizers.factored import flash_factored_adamw, scale_by_factored_adam
from optax_lowmem._src.optim.optimizers.lion import flash_lion, scale_by_flash_lion
from optax_lowmem._src.optim.optimizers.muon import flash_muon
from optax_lowmem._src.optim.optimizers.sgd import flash_sgd, flash_trace
from optax_lowmem._src.optim.optimizers.stable_adamw import stable_adamw
from optax_lowmem._src.optim.step.masters import master_params
from optax_lowmem._src.optim.step.storage import Policy, Storage
from optax_lowmem._src.optim.wrappers.accumulate import accumulate_gradients, value_and_grad
from optax_lowmem._src.optim.wrappers.chain import chain, step
from optax_lowmem._src.optim.wrappers.compress import (
    compand_momentum,
    compress_state,
    sqrt_variance_quant,
)
from optax_lowmem._src.optim.wrappers.ema import ema_params, track_master_ema
from optax_lowmem._src.optim.wrappers.explain import explain
from optax_lowmem._src.optim.wrappers.fuse import fuse_updates
from optax_lowmem._src.optim.wrappers.init import init
from optax_lowmem._src.optim.wrappers.inject import inject_hyperparams
from optax_lowmem._src.optim.wrappers.reset import reset
from optax_lowmem._src.optim.wrappers.slots import register_slot
from optax_lowmem._src.optim.wrappers.soap import flash_soap, scale_by_soap
from optax_lowmem._src.optim.wrappers.split import split_master_weights
from optax_lowmem._src.optim.wrappers.update_clipping import update_clipping
from optax_lowmem._src.training.gaussws_noise.noisy import gaussws_noise

try:
    __version__ = _metadata.version("optax-lowmem")
except _metadata.PackageNotFoundError:  # run from a checkout
    __version__ = "0+checkout"

__all__ = [
    "OPTIMIZERS",
    "Policy",
    "Storage",
    "accumulate_gradients",
    "adam_mini",
    "b2_schedule",
    "blocks",
    "chain",
    "checkpoint",
    "coat_adamw",
    "codecs",
    "compand_momentum",
    "compress_state",
    "diagnostics",
    "ema_params",
    "explain",
    "flash_adam",
    "flash_adam_mini",
    "flash_adamw",
    "flash_factored_adamw",
    "flash_lion",
    "flash_muon",
    "flash_sgd",
    "flash_soap",
    "flash_trace",
    "gaussws",
    "gaussws_noise",
    "implementations",
    "init",
    "fuse_updates",
    "inject_hyperparams",
    "master_params",
    "memory",
    "q_adam_mini",
    "q_adamw",
    "register_slot",
    "release",
    "reset",
    "scale_by_adam_mini",
    "scale_by_factored_adam",
    "scale_by_flash_adam",
    "scale_by_flash_lion",
    "scale_by_soap",
    "sharding",
    "split_master_weights",
    "sqrt_variance_quant",
    "stable_adamw",
    "step",
    "track_master_ema",
    "update_clipping",
    "value_and_grad",
]
