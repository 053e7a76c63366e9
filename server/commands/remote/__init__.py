"""Shared by the commands that query a running server: `cohabit models`, `load`, `unload` and `stats`."""
