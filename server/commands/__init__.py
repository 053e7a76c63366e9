"""The commands other than `serve`: those that plan, and in `remote` those that query a running server."""
