"""What can only be known on a machine with a GPU: `python -m tests.gpu` (or `make gpu`) runs it."""
