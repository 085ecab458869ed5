"""Triton kernels around attention, and plain torch where they cannot run."""
