"""The commands that make plans and look at them: `cohabit plan`, `show` and `compare-plans`."""
