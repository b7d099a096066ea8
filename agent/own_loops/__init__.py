"""Jobs that keep their own loop: what they report, and how they run a plan's ops."""
