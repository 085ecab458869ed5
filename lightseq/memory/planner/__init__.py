"""Estimates of memory and step time, and the choice of a memory plan."""
