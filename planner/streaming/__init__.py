"""Ours: what `planner.searchers.streaming` plays, anneals and writes."""
