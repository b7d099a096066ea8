"""A user's model and data: layers, what passes between them, where they come from."""
