"""Imports Hugging Face models, modules and checkpoints as repository entries. Importing runs a model's code."""
