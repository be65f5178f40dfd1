"""Losses that never hold all logits."""
