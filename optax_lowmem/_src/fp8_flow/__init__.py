"""COAT's FP8 precision flow: functions, kernels, layers and a Llama block."""
