"""Objectives of a run: shares of a loss, their divisor, metrics, evaluation, and the models they need."""
