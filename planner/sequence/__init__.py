"""Plans without addresses: actions in order, and how they become a plan."""
