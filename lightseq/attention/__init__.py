"""Distributed attention as one operator, from the schedule's table to the kernel calls of a rank."""
