"""Predictions of memory and step time without a GPU."""
