"""Ranks that share a sequence, and what each of them holds. Knows neither attention nor models."""
