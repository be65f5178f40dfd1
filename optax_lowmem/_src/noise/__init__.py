"""Gaussian weight sampling (GaussWS): noise, kernels, transformation, layers, casts."""
