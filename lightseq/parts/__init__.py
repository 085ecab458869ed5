"""Parts of a model: how each is found, its costs, and how it is replaced and restored."""
