"""Memory and time of a run before it starts, and the choice of its settings."""
