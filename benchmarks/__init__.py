"""Benchmarks of lightseq and its peers. Each program writes JSONL that `python3 -m analysis` reads.

attention.py times an attention layer, host.py its CPU time, step.py whole training steps, plan_points.py the steps
that test the planner. largest.py searches for the largest model, architectures.py trains every model class.
"""

from lightseq.distributed.environment import set_up_process

set_up_process()  # before torch and transformers are imported
