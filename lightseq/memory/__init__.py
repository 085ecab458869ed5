"""Placement of activations (on the device, in host memory, or recomputed), and optimizer state in host memory."""
