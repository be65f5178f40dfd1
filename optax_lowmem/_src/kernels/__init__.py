"""GPU kernels: described once, run by Pallas or as generated Triton."""
