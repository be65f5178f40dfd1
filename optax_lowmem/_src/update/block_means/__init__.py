"""The mean of squares over each block of a leaf: what Adam-mini's second moment takes in."""

from optax_lowmem._src.update.block_means.dispatch import means_of_squares as means_of_squares
