"""What the planner is evaluated on: graphs of real networks, profiles of real devices, allocation problems."""
