"""Searchers from published methods, for comparison and for training graphs."""
