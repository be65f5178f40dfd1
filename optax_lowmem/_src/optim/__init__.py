"""Optimizers: rules, plans, states and steps, and the wrappers around them."""
