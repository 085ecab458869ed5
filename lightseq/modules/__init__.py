"""Replacements for parts of transformers' decoder layers and loss, which take less memory or time."""
