"""Benchmarks: each writes one file to docs/results, with the command, the machine and the numbers."""
