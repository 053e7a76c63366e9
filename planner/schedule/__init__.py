"""What happens when: the schedule, its waits and lanes, the simulator, and evictions that become schedules."""
