"""Fallback of a run that ran out of GPU memory: all ranks start over with the next memory plan."""

import sys

from lightseq.config.train_config import TrainConfig
from lightseq.distributed.agreement import is_first_to
from lightseq.distributed.watchdog import Watchdog
from lightseq.distributed.world import World
from lightseq.memory.planner.advice import RETRY_SHARE
from lightseq.memory.planner.choice import make_plan
from lightseq.memory.planner.plan import Plan, on_smaller_gpus


def fall_back(plan: Plan, config: TrainConfig, world: World, watchdog: Watchdog, reason: str) -> None:
    """Starts the run over with a plan that takes a tenth less memory. Returns if there is none.

    The new attempt resumes from the newest complete checkpoint of this launch, or begins anew without one. `config` has
    the flags as given: the planner obeys them again.
    """
    limit = RETRY_SHARE * plan.parts.total
    config = config.resolve_memory_flags(on_gpu=world.device.type == "cuda")
    # Takes back what the planner chose beside the flags.
    unplanned = plan.run.changed(
        config=config, state_offloaded=False, layers_with_state_on_gpu=0, reshard_after_forward=True
    )
    following = make_plan(on_smaller_gpus(unplanned, limit))
    if not following.fits:
        return
    if is_first_to("fall back"):
        restart = f"starting over with the next memory plan: {following}"
        print(f"rank {world.rank}: {reason}; {restart}", file=sys.stderr, flush=True)
    watchdog.start_over(limit)
