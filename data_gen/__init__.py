"""Data sets for training: synthetic tokens with a known structure, or text run through a tokenizer."""
