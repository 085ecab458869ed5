"""Proves on the user's own hardware and flags that a distributed step computes what one process computes."""
