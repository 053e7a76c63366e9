"""Swap planning for models larger than memory: graph, profile and budget in, plan out. Does not import torch."""
