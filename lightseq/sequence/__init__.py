"""Ranks that share a sequence and the part that each holds. Depends on neither attention nor models."""
