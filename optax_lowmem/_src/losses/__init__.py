"""Losses that never store all logits."""
