"""Layers that mix tokens without attention, over a sequence that ranks share: recurrent scans and short convolutions."""
