"""Verification of a distributed step against one process, on the user's hardware and flags."""
