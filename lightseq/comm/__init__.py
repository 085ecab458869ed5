"""Transports of bytes between the ranks of a group. They know nothing of attention."""
