"""What a training run is asked to do, and how people write it on a command line."""
