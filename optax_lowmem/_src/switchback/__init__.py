"""SwitchBack's 8-bit linear layers: products, kernels, layers, the converter."""
