"""Measures lightseq and its peers side by side, and writes what it measured as JSONL."""
