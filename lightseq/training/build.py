"""Builds a run's engine: plans its memory, shards the model, loads weights or a checkpoint."""

from dataclasses import replace

import torch

from lightseq.checkpoint import resume
from lightseq.config.train_config import TrainConfig
from lightseq.distributed.agreement import on_all_ranks
from lightseq.distributed.start_over import memory_limit
from lightseq.distributed.watchdog import Watchdog
from lightseq.distributed.world import World, make_deterministic
from lightseq.memory.recomputation import MemorySettings
from lightseq.plan.make_plan import plan_on_all_ranks
from lightseq.plan.plan import Plan
from lightseq.plan.run import planned_run
from lightseq.training.deepspeed_engine import DeepSpeedEngine
from lightseq.training.device_memory import out_of_memory_handler
from lightseq.training.engine import Engine
from lightseq.training.fsdp_engine import FsdpEngine
from lightseq.training.host_budget import host_memory_for_layers
from lightseq.training.inputs import Inputs
from lightseq.training.metrics import earlier_plan


def build_engine(config: TrainConfig, inputs: Inputs, world: World, watchdog: Watchdog | None = None) -> Engine:
    """Builds the sharded model and its optimizer, and loads the weights or the checkpoint.

    The planner fills in memory flags that are not given. If memory runs out, the run starts over with the next plan if
    there are a watchdog and such a plan; otherwise it ends with an explanation.
    """
    torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
    if config.deterministic:
        make_deterministic()
    memory, planned, plan = choose_memory_settings(config, inputs, world)
    inputs = replace(inputs, dims=replace(inputs.dims, expert=planned.expert_ranks))
    on_all_ranks(world, inputs.dims.make_meshes)
    with out_of_memory_handler(config, inputs, world, plan, watchdog):
        if inputs.deepspeed is None:
            engine: Engine = FsdpEngine(planned, inputs, memory, plan)
        else:
            engine = DeepSpeedEngine(planned, inputs, memory, plan)
    resume_engine(engine, config, inputs, world, watchdog)
    return engine


def choose_memory_settings(
    config: TrainConfig, inputs: Inputs, world: World
) -> tuple[MemorySettings, TrainConfig, Plan | None]:
    """Returns the memory settings, the flags with the planner's choices, and its plan: the same on all ranks.

    On CPUs and under DeepSpeed the planner decides nothing, except with budgets of memory; then there is no plan.
    """
    config, plan = config.resolve_memory_flags(on_gpu=world.device.type == "cuda"), None
    in_4_bits = inputs.packed_base is not None and inputs.packed_base.is_nf4
    config = replace(config, load_in_4bit=in_4_bits)  # also if the model's files have four bits
    teacher = inputs.teacher and inputs.teacher.config
    run = planned_run(config, inputs.model_config, world, inputs.documents, teacher)
    if config.offload == "auto" or (world.device.type == "cuda" and inputs.deepspeed is None):
        plan = plan_on_all_ranks(run, world, earlier_plan(inputs.resume_from), memory_limit())
        run, config = plan.run, plan.run.config
    memory = MemorySettings(
        state_on_host=run.state_on_host,
        layers_with_state_on_gpu=run.layers_with_state_on_gpu,
        reshard_after_forward=run.reshard_after_forward,
        placement=plan.placement if plan and config.offload == "auto" else None,
        activation_bytes=host_memory_for_layers(run, world, inputs.deepspeed),
    )
    return memory, config, plan


def resume_engine(
    engine: Engine, config: TrainConfig, inputs: Inputs, world: World, watchdog: Watchdog | None = None
) -> None:
    """Restores weights, optimizer and random states if the run resumes from a checkpoint."""
    if (directory := inputs.resume_from) is None:
        return

    def restore() -> None:
        engine.restore(directory)
        resume.restore_rng_state(directory, world)

    with out_of_memory_handler(config, inputs, world, engine.plan, watchdog):
        on_all_ranks(world, restore)
