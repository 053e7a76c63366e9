"""Beaumont et al.: chains of layers, and which activations to offload."""
