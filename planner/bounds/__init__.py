"""Lower bounds on the latency of plans."""
