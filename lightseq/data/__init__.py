"""From rows of any source to batches: tokens, windows of documents, packed sequences."""
