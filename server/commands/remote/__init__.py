"""Commands that query a running server: `cohabit models`, `load`, `unload`, `stats` and `top`."""
