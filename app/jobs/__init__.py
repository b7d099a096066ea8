"""What the console knows of each job: its state in memory, what is said to it, asked of it and shown of it."""
