"""Transformations around an optimizer: compress, split, accumulate, average, explain."""
