"""What is seen of running jobs: op times, measured iterations, goodput, events, logs."""
