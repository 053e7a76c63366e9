"""The ways to search for a plan, one file each: the papers' and ours."""
