"""What trains whole models beside lightseq in step.py, each in processes of its own (worker.py)."""
