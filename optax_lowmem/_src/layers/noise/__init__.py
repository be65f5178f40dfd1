"""GaussWS: noise on weights, its kernels, layers, bitwidths and casts."""
