"""TPU kernel for the step of a leaf."""
