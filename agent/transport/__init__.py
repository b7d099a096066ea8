"""Carries activations, gradients and sums between workers, on CPUs and on GPUs, and forms the groups for it."""
