"""Memory of a run: activations that are stored, offloaded or recomputed, and optimizer state on the host."""
