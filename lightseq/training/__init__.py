"""Training: trainer, engines, optimizer, evaluation, metrics and terminal output."""
