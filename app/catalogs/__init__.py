"""Catalogs in the console: filled, stored, reported and exported."""
