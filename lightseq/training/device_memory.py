"""Peak device memory of a run by purpose, and what happens when it runs out."""

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from lightseq.config.train_config import TrainConfig
from lightseq.distributed.agreement import is_first_to
from lightseq.distributed.watchdog import Watchdog
from lightseq.distributed.world import World
from lightseq.plan.advice import RETRY_SHARE, out_of_memory
from lightseq.plan.breakdown import Breakdown
from lightseq.plan.make_plan import make_plan
from lightseq.plan.plan import Plan, on_smaller_gpus, plan_as_given
from lightseq.plan.run import planned_run
from lightseq.training.engine import Engine
from lightseq.training.errors import exit_on_out_of_memory
from lightseq.training.inputs import Inputs
from lightseq.training.terminal import Terminal


def out_of_memory_handler(
    config: TrainConfig,
    inputs: Inputs,
    world: World,
    plan: Plan | None,
    watchdog: Watchdog | None,
    terminal: Terminal | None = None,
) -> AbstractContextManager[None]:
    """Returns a context that handles running out of memory.

    The run starts over with the next plan if there are a plan and a watchdog; otherwise it ends with an explanation.
    """

    def next_plan(reason: str) -> None:
        if plan is not None and watchdog is not None:
            fall_back(plan, config, world, watchdog, reason)

    def explain() -> Sequence[str]:
        if watchdog is not None:
            watchdog.mark_explained()
        teacher = inputs.teacher and inputs.teacher.config
        flags = config.resolve_memory_flags(on_gpu=world.device.type == "cuda")
        return out_of_memory(planned_run(flags, inputs.model_config, world, inputs.documents, teacher))

    return exit_on_out_of_memory(world, terminal, explain, next_plan)


def fall_back(plan: Plan, config: TrainConfig, world: World, watchdog: Watchdog, reason: str) -> None:
    """Starts all ranks over with a plan that takes a tenth less memory. Returns if there is none.

    The new attempt resumes from the newest complete checkpoint of this launch, or begins anew without one. `config` has
    the flags as given: the planner obeys them again.
    """
    limit = RETRY_SHARE * plan.parts.total
    # Takes back what the planner chose beside the flags.
    unplanned = plan.run.changed(
        config=config.resolve_memory_flags(on_gpu=world.device.type == "cuda"),
        state_offloaded=False,
        layers_with_state_on_gpu=0,
        reshard_after_forward=True,
    )
    following = make_plan(on_smaller_gpus(unplanned, limit))
    if not following.fits:
        return
    if is_first_to("fall back"):
        restart = f"starting over with the next memory plan: {following}"
        print(f"rank {world.rank}: {reason}; {restart}", file=sys.stderr, flush=True)
    watchdog.start_over(limit)


def memory_parts(engine: Engine, world: World) -> Breakdown:
    """Returns the peak device memory so far by purpose: as planned, and working memory for the rest of the peak."""
    plan = engine.plan or plan_as_given(planned_run(engine.config, engine.model.config, world))
    transport = engine.context.transport
    parts = replace(plan.parts, attention_buffers=transport.buffer_bytes)
    if engine.config.deepspeed:  # the planner does not know its state
        parts = replace(parts, parameters=0, gradients=0, optimizer=0)
    not_in_allocator = transport.buffer_bytes + transport.graph_bytes
    return parts.at_peak(torch.cuda.max_memory_allocated(world.device) + not_in_allocator)
