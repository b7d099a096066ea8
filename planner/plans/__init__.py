"""Plans and their schedules: their formats, their bounds, and the numbers computed from them."""
