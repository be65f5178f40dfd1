"""Checkpoints: description and check of the format, files, conversions, export."""
