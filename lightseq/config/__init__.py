"""Flags of a training run: their dataclasses, command line, files and checks."""
