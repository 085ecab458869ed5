"""Measures lightseq and its peers side by side, and writes what it measured as JSONL."""

from lightseq.distributed.environment import set_up_process

set_up_process()  # before torch and transformers are imported
