"""Training data: synthetic tokens with a known structure, or tokenized text."""
