"""Simulates how parameters stream through memory while ops run, for given decisions."""
