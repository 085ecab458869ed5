"""Activation offloading and checkpointing, optimizer state in host memory, and the memory planner."""
