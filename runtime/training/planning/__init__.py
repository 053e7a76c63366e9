"""Plans of a recorded training step: its graph, a search for a plan in the background, and the advice of a plan."""
