"""Checkpoints: writing during training, verification, retention and resuming."""
