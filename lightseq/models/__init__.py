"""Models of transformers: config, class, presets, weights and their formats."""
