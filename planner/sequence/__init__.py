"""Plans without addresses: what happens in which order, and how that becomes a plan."""
