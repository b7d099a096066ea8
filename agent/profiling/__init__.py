"""Measures the op times, transfers and bytes that plans are made from."""
