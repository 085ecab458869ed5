"""A run as files: written beside the training, checked, found again and resumed from."""
