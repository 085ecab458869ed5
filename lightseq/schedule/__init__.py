"""Who computes which tile when, as tables: layouts, schedules, their proofs and what they cost."""
