"""GPU kernels, described once, run by Pallas or as generated Triton; what a machine supports."""
