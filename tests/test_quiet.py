"""lightseq in a user's script prints nothing, and leaves its environment, loggers and warning filters alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# What stands before `begin` is the user's own; what follows is ours.
SNAPSHOT = """
import logging, os, sys, warnings
import torch.distributed as dist, transformers.modeling_utils
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

def state():
    loggers = {name: x for name, x in logging.root.manager.loggerDict.items() if isinstance(x, logging.Logger)}
    told = {name: (x.level, x.propagate, x.disabled, list(x.handlers)) for name, x in loggers.items()}
    return dict(os.environ), list(warnings.filters), logging.root.handlers[:], sys.excepthook, sys.meta_path[:], told

model = LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                     num_attention_heads=2, num_key_value_heads=2))
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
before = state()
for stream in (sys.stdout, sys.stderr):
    print("begin", file=stream, flush=True)
from lightseq import hf
import lightseq.parallelize
context = hf.enable(model)
batch = hf.shard_batch(context, *[transformers.modeling_utils.torch.arange(9)[None]] * 2)
model(**batch).loss.backward()
after = state()
for name, was, is_ in zip(("environment", "filters", "handlers", "hook", "finders"), before, after):
    assert was == is_, (name, was, is_)
changed = [name for name, told in before[-1].items() if after[-1][name] != told]
assert not changed, changed
os._exit(0)  # what torch says at the end is not ours
"""


def run(program: str) -> tuple[str, str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.slow
def test_importing_lightseq_prints_nothing_and_loads_neither_the_planner_nor_the_flags() -> None:
    loaded = "print([x for x in ('lightseq.memory', 'lightseq.config.train_config') if x in sys.modules])"
    found = run(f"import sys; from lightseq import hf; {loaded}; hf.plan_memory; {loaded}; import lightseq.parallelize")
    assert found == ("[]\n['lightseq.memory', 'lightseq.config.train_config']\n", "")


@pytest.mark.slow
def test_lightseq_leaves_environment_loggers_and_warnings_of_a_script_alone() -> None:
    assert [text.partition("begin\n")[2] for text in run(SNAPSHOT)] == ["", ""]
