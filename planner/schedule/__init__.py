"""Schedules and their waits, the simulator, and schedules from one choice per gap between uses."""
