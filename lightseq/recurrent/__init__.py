"""Recurrent scans and short convolutions over a sequence that ranks share."""
