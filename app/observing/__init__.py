"""What is observed of running jobs: measured iterations, goodput, history, the feed, logs."""
