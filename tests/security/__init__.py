"""Attacks on a console of our own on loopback, bounded in time and number."""
