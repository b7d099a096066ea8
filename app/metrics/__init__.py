"""What the console tells Prometheus."""
