"""Kernels: `attention/` computes one tile of attention, `fused/` holds Triton kernels for what stands around it."""
