"""One worker process: its iterations, recovery, state transfers, and layers that move."""
