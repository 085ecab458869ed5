"""Training runs that are broken on purpose, in every way that docs/reliability.md lists."""
