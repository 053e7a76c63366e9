"""Lowers exported models to programs, measures them, and runs them on lanes under a memory cap."""
