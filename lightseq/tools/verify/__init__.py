"""Comparison of a distributed step with one process, on the user's own hardware and flags."""
