"""One stage on one worker: its forward and backward, the sum of its gradients, its step and what undoes it."""
