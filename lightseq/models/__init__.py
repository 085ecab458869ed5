"""What a model is: its architecture, presets and names, weights in and out, adapters, and its operations."""
