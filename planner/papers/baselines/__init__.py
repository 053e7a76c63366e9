"""Earlier systems that swap or recompute, for comparison, each at its own paper's scope."""
