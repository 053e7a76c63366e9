"""Beaumont, Eyraud-Dubois and Shilova: offloading of activations in chains of layers."""
