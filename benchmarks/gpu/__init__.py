"""Benchmarks that need a CUDA device: `make gpu-check` runs them after the tests marked `gpu`."""
