"""Predictions of memory and step time without a GPU, and rehearsals on one."""
