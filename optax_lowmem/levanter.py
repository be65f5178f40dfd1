"""`flash_adamw` in Levanter: import this module, then `optimizer: {type: flash_adamw}`."""

from optax_lowmem._src.training.levanter import FlashAdamWConfig

__all__ = ["FlashAdamWConfig"]
