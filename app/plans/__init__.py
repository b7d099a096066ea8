"""Plans that people ask for, keep, refer to, compare and take away."""
