"""Moves bytes between the ranks of a group, and knows nothing of attention."""
