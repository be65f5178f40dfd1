"""Reports of the bytes of weights, optimizer state and activations."""
