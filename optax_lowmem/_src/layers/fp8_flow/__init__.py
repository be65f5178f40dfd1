"""COAT's FP8 activations: functions, kernels, layers and a Llama block."""
