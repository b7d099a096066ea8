"""What workers, launchers and the console say to each other, and how it is sent."""
