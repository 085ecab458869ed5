"""Attention kernels behind one interface. They compute tiles and know nothing of ranks."""
