"""Which option is best while workers are out, and when a job is told."""
