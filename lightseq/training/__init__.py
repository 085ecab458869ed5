"""A training run from its first step to its last: trainer, engines, optimizer, and what it says of itself."""
