"""Checkpoints of a job, and the weights it ends with."""
