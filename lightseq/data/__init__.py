"""Data sources, tokenization, windows of documents, packing and batches."""
