"""Plans for every failure that a job is to survive, made ahead."""
