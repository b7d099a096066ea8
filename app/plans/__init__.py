"""The plans of running jobs, and those that people ask for, keep, refer to and take away."""
