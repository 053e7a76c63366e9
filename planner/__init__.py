"""Plans for models that do not fit: graph, profile and budget in, swap plan out. Knows nothing of torch."""
