"""Ours: what `planner.streaming.searcher` plays, anneals and writes."""
