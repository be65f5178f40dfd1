"""Format and its check, checksums, Orbax, conversion from and to optax, export."""
