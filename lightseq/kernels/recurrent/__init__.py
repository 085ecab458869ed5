"""Kernels of linear recurrences, which carry a state through a sequence: one interface, in `base.py`."""
