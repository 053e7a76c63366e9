"""Where bytes lie: lifespans, placements, and the least memory that they need."""
