"""Blocks of elements that share a second moment: their structure in a model, and their means."""
