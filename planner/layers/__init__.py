"""Decides which layers each stage has, and which stage each worker has."""
