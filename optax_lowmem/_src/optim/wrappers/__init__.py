"""Around an optimizer: init, chain, step, compress, split, accumulate, average, clip, explain."""
