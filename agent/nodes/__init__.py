"""A job on several machines: one launcher leads, the others start and end workers for it."""
