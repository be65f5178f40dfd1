"""Roles of parameters; blocks that share a second moment: structure in a model, and means."""
