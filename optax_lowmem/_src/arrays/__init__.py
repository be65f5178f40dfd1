"""Numerics, random bits, groups and codecs of arrays; trees of parameters and their roles."""
