"""Benchmarks: one protocol, one record format, tables generated from the records."""
