"""Starts and watches the worker processes of a job, and writes its record."""
