"""Shared by the planning commands: flags for the model, measuring and search; progress; files of plans."""
