"""Optimizers for JAX whose state takes a quarter of the memory, as optax transformations."""

import importlib.metadata as _metadata

from optax_lowmem import blocks as blocks
from optax_lowmem import checkpoint as checkpoint
from optax_lowmem import codecs as codecs
from optax_lowmem import diagnostics as diagnostics
from optax_lowmem import gaussws as gaussws
from optax_lowmem import memory as memory
from optax_lowmem import release as release
from optax_lowmem import sharding as sharding
from optax_lowmem._src.core.policy import Policy as Policy
from optax_lowmem._src.noise.noisy import gaussws_noise as gaussws_noise
from optax_lowmem._src.optimizers import OPTIMIZERS as OPTIMIZERS
from optax_lowmem._src.optimizers.adam import b2_schedule as b2_schedule
from optax_lowmem._src.optimizers.adam import coat_adamw as coat_adamw
from optax_lowmem._src.optimizers.adam import flash_adam as flash_adam
from optax_lowmem._src.optimizers.adam import flash_adamw as flash_adamw
from optax_lowmem._src.optimizers.adam import scale_by_flash_adam as scale_by_flash_adam
from optax_lowmem._src.optimizers.adam_mini import adam_mini as adam_mini
from optax_lowmem._src.optimizers.adam_mini import flash_adam_mini as flash_adam_mini
from optax_lowmem._src.optimizers.adam_mini import q_adam_mini as q_adam_mini
from optax_lowmem._src.optimizers.adam_mini import q_adamw as q_adamw
from optax_lowmem._src.optimizers.adam_mini import scale_by_adam_mini as scale_by_adam_mini
from optax_lowmem._src.optimizers.factored import flash_factored_adamw as flash_factored_adamw
from optax_lowmem._src.optimizers.factored import scale_by_factored_adam as scale_by_factored_adam
from optax_lowmem._src.optimizers.lion import flash_lion as flash_lion
from optax_lowmem._src.optimizers.lion import scale_by_flash_lion as scale_by_flash_lion
from optax_lowmem._src.optimizers.muon import flash_muon as flash_muon
from optax_lowmem._src.optimizers.sgd import flash_sgd as flash_sgd
from optax_lowmem._src.optimizers.sgd import flash_trace as flash_trace
from optax_lowmem._src.optimizers.stable_adamw import stable_adamw as stable_adamw
from optax_lowmem._src.step.masters import master_params as master_params
from optax_lowmem._src.step.scopes import implementations as implementations
from optax_lowmem._src.step.storage import Storage as Storage
from optax_lowmem._src.wrappers.accumulate import accumulate_gradients as accumulate_gradients
from optax_lowmem._src.wrappers.accumulate import value_and_grad as value_and_grad
from optax_lowmem._src.wrappers.chain import chain as chain
from optax_lowmem._src.wrappers.chain import step as step
from optax_lowmem._src.wrappers.compress import compand_momentum as compand_momentum
from optax_lowmem._src.wrappers.compress import compress_state as compress_state
from optax_lowmem._src.wrappers.compress import sqrt_variance_quant as sqrt_variance_quant
from optax_lowmem._src.wrappers.ema import ema_params as ema_params
from optax_lowmem._src.wrappers.ema import track_master_ema as track_master_ema
from optax_lowmem._src.wrappers.explain import explain as explain
from optax_lowmem._src.wrappers.fuse import fuse_updates as fuse_updates
from optax_lowmem._src.wrappers.init import init as init
from optax_lowmem._src.wrappers.inject import inject_hyperparams as inject_hyperparams
from optax_lowmem._src.wrappers.loss_scale import per_tensor_loss_scale as per_tensor_loss_scale
from optax_lowmem._src.wrappers.pack import pack_small_leaves as pack_small_leaves
from optax_lowmem._src.wrappers.reset import reset as reset
from optax_lowmem._src.wrappers.slots import register_slot as register_slot
from optax_lowmem._src.wrappers.split import split_master_weights as split_master_weights
from optax_lowmem._src.wrappers.update_clipping import update_clipping as update_clipping

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
    "flash_trace",
    "gaussws",
    "gaussws_noise",
    "implementations",
    "init",
    "fuse_updates",
    "inject_hyperparams",
    "master_params",
    "memory",
    "pack_small_leaves",
    "per_tensor_loss_scale",
    "q_adam_mini",
    "q_adamw",
    "register_slot",
    "release",
    "reset",
    "scale_by_adam_mini",
    "scale_by_factored_adam",
    "scale_by_flash_adam",
    "scale_by_flash_lion",
    "sharding",
    "split_master_weights",
    "sqrt_variance_quant",
    "stable_adamw",
    "step",
    "track_master_ema",
    "update_clipping",
    "value_and_grad",
]
