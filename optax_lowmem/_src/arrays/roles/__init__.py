"""Roles of parameters in a model, read from their names and shapes."""
