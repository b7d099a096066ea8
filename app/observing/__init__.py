"""What is observed of running jobs: measured iterations, goodput, the history of heartbeats, metrics."""
