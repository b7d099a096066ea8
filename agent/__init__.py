"""Trains, reports and repairs: what runs in the training processes and beside them."""
