"""Commands that ask a running server: `cohabit models`, `load`, `unload`, `stats` and `top`."""
