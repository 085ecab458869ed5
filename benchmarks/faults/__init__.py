"""Breaks training runs on purpose, in every way that we know of, and counts what was lost."""
