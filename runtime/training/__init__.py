"""Training loops under a byte budget: ops run eagerly, their storages are evicted and swapped in."""
