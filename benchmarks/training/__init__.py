"""Whole training steps, measured: lightseq's trainer, and what one would use instead."""
