"""Other implementations of whole training steps; worker.py runs one in processes of its own for step.py."""
