"""GPU kernels for the step of several leaves."""
