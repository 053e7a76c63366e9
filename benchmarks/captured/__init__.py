"""A training step that is captured once and executed by a plan of counted tensors, for the papers' tables.

Users' loops run under `cohabit.budget`, which captures nothing.
"""
