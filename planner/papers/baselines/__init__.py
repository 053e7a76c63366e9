"""Earlier systems that swap or recompute, to compare with, at each paper's own scope."""
