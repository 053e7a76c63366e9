"""Memory layout: placement of blocks, and the least memory of a graph."""
