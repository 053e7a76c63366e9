"""Lower bounds of a plan's latency."""
