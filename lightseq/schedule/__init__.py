"""Attention schedules as tables: layouts, tiles and moves, their proofs and their cost."""
