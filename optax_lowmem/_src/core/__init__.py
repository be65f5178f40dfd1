"""Numerics, randomness, groups and policy: what every other part rests on."""
