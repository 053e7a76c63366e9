"""SwapAdvisor (ASPLOS'20): its operators on schedules and memory pools, and its swap planner."""
