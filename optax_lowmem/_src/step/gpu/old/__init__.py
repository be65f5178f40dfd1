"""The step as it was described before, for one comparison on a GPU."""
