"""Kernels: `attention/` computes one tile of attention, `fused/` holds Triton kernels for the work around it."""
