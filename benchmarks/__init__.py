"""Benchmarks of lightseq and its peers. Each program writes JSONL that `python3 -m analysis` reads.

attention.py times an attention layer, step.py whole training steps. largest.py searches for the largest model,
architectures.py trains every model class.
"""

from lightseq.distributed.environment import set_up_process

# Before torch and transformers are imported. Peers keep torch's own memory segments; lightseq's trials set theirs.
set_up_process(expandable_segments=False)
