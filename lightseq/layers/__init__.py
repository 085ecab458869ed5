"""What a decoder layer and the head are made of where transformers' own would take more memory or time."""
