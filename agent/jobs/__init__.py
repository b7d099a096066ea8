"""From what a person gave to a job that runs."""
