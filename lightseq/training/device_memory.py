"""Peak device memory of a run by purpose, and what happens when it runs out."""

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from lightseq.attention.context import SequenceContext
from lightseq.config.train_config import TrainConfig
from lightseq.distributed.agreement import is_first_to
from lightseq.distributed.watchdog import Watchdog
from lightseq.distributed.world import World
from lightseq.plan.advice import RETRY_SHARE, out_of_memory
from lightseq.plan.breakdown import Breakdown, loss_bytes, measured_state_bytes
from lightseq.plan.make_plan import make_plan
from lightseq.plan.memory import stored_activations
from lightseq.plan.plan import Plan, on_smaller_gpus
from lightseq.plan.run import planned_run
from lightseq.schedule.documents import local_tokens
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


def tokens_per_forward(config: TrainConfig, context: SequenceContext) -> int:
    """Returns a rank's tokens in a forward pass of the longest batch."""
    tokens = local_tokens(context.schedule, config.model_max_length, config.packing != "none")
    return tokens * config.per_device_train_batch_size


def memory_parts(engine: Engine, world: World, taken_by_forward: int | None = None) -> Breakdown:
    """Returns the breakdown of the peak device memory so far.

    `taken_by_forward`: bytes that a forward pass was measured to leave allocated, if known.
    """
    config, model = engine.config, engine.model.config
    tokens = tokens_per_forward(config, engine.context)
    states = measured_state_bytes((engine.model, *engine.frozen.values()), config, engine.memory.state_on_host)
    logits, gradients = loss_bytes(model, config, tokens)
    if taken_by_forward is not None:
        stored = max(0, taken_by_forward - gradients)
    else:
        offloaded = 0 if engine.offload is None else engine.offload.memory.allocated_bytes
        stored = max(0, stored_activations(planned_run(config, model, world)) - offloaded)
    transport = engine.context.transport
    parts = Breakdown(
        parameters=int(states.parameters),
        gradients=int(states.gradients),
        optimizer=int(states.optimizer),
        stored_activations=stored,
        loss=logits + gradients,
        attention_buffers=transport.buffer_bytes,
        working=0,
    )
    if world.device.type != "cuda":
        return parts
    not_in_allocator = transport.buffer_bytes + transport.graph_bytes
    return parts.at_peak(torch.cuda.max_memory_allocated(world.device) + not_in_allocator)
