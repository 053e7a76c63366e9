"""Load tests as an HTML page."""
