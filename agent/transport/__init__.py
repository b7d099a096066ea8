"""The data plane: what carries activations, gradients and sums between workers, on CPUs and on GPUs."""
