"""What a training loop needs around an optimizer and a model."""
