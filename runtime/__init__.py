"""Lowers exported models to programs, profiles them, and runs them on lanes under a memory limit."""
