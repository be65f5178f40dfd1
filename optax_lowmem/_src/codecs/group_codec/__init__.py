"""Encode and decode of one array alone: checkpoints, state of other optimizers, diagnostics."""

from optax_lowmem._src.codecs.group_codec.dispatch import decode as decode
from optax_lowmem._src.codecs.group_codec.dispatch import encode as encode
from optax_lowmem._src.codecs.group_codec.dispatch import supported as supported
