"""The library's code; what is public is imported from the modules of `optax_lowmem`."""
