"""Implementations that the step benchmark times: our step and others', in JAX and in torch."""
