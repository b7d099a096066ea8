"""A plan and its schedule: forms, bounds, what is computed from them."""
