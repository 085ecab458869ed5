"""Other implementations of whole training steps; worker.py runs one of them in separate processes for step.py."""
