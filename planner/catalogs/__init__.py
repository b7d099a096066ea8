"""Plans made ahead, for every failure that a job is to survive."""
