"""Parts of a decoder layer and the loss, where transformers' own take more memory or time."""
