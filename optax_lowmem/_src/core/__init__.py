"""Numerics on bits, random bits, groups, policy, names of parameters, and the context of a call."""
