"""Load tests as an HTML page, and as pictures."""
