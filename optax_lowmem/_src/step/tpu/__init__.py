"""The step of a parameter as a TPU kernel."""
