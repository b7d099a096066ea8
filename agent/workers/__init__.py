"""One worker process: iterations, recovery, hand-over, layers that move."""
