"""One folder an operation: its XLA reference, the specification, and its backends."""
