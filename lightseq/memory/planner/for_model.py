"""Memory plan of a model in a user's own loop, who calls it as `hf.plan_memory`."""

import dataclasses
from typing import Any

import torch
import torch.distributed as dist

from lightseq.utils import quiet_transformers  # noqa: F401  first, because the modules below import transformers

# isort: split
from transformers import PreTrainedConfig, PreTrainedModel

from lightseq.config.train_config import TrainConfig
from lightseq.memory.planner.choice import make_plan
from lightseq.memory.planner.plan import Plan
from lightseq.memory.planner.run import Hardware, PlannedRun, hardware_here
from lightseq.utils.formatting import check_names


def plan_memory(
    model: PreTrainedModel | PreTrainedConfig, length: int, hardware: Hardware | None = None, **flags: Any
) -> Plan:
    """Returns the fastest memory plan for sequences of `length` tokens that fits, as training chooses it.

    `hardware` is that of this process group unless given. `flags` are those of training, such as `bf16=True`,
    `remat="attention"` or `lora_rank=16`; given ones are obeyed. The plan says in `run.config` what to compile,
    recompute and offload, in `parts` the bytes of a GPU, in `step_seconds` the time, and in `fits` whether it fits;
    print it for one line. Raises ValueError without a GPU or `hardware`, and for flags that exclude each other.
    """
    if hardware is None:
        if not torch.cuda.is_available():
            raise ValueError("there is no GPU here; pass hardware=Hardware(...) of lightseq.memory.planner.run")
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        per_host = min(ranks, torch.cuda.device_count())
        hardware = hardware_here(ranks, per_host, torch.device("cuda", torch.cuda.current_device()))
    check_names("hf.plan_memory", flags, [field.name for field in dataclasses.fields(TrainConfig)])
    config = TrainConfig(model_max_length=length, **flags)
    return make_plan(PlannedRun(model if isinstance(model, PreTrainedConfig) else model.config, config, hardware))
