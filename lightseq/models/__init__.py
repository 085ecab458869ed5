"""Models: architecture, presets and names, reading and writing weights, adapters, and FLOP counts."""
