"""Distributed attention as one operator, lowered from the schedule's table to the kernel calls of a rank."""
