"""Searchers of published methods, for comparison and for training graphs."""
