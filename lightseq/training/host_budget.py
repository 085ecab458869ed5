"""Host memory that the layers of this rank may offload to."""

from lightseq.config.deepspeed import DeepSpeedSettings
from lightseq.config.optimizers import OPTIMIZERS
from lightseq.distributed.host_memory import free_host_memory, host_bytes_for_layers
from lightseq.distributed.world import World
from lightseq.plan.breakdown import GIB
from lightseq.plan.memory import state_bytes_on_host
from lightseq.plan.run import PlannedRun
from lightseq.schedule.timing import FLOAT32_BYTES


def host_memory_for_layers(run: PlannedRun, world: World, deepspeed: DeepSpeedSettings | None = None) -> float:
    """Returns the bytes that this rank's layers may offload. Call it before the model allocates host memory."""
    if (budget := run.config.host_memory_budget) is not None:
        return budget * GIB
    state = deepspeed_bytes_on_host(run, deepspeed) if deepspeed else state_bytes_on_host(run)
    return host_bytes_for_layers(free_host_memory(world, share=1.0), state)


def deepspeed_bytes_on_host(run: PlannedRun, settings: DeepSpeedSettings) -> float:
    """Returns an upper bound on the host memory of a rank, in bytes, under DeepSpeed's offloading.

    Follows DeepSpeed 0.19.8 (stage_1_and_2.py, stage3.py). Torch pins powers of two, so pinned memory counts twice.
    """
    weights, element, taken = run.local_parameters, run.itemsize, 0.0

    def pinning(part: str) -> int:
        return 2 if settings.settings["zero_optimization"][part].get("pin_memory", True) else 1

    if settings.on_cpu("offload_optimizer"):
        accumulates = settings.stage < 3 and run.config.gradient_accumulation_steps > 1
        # Masters, gradients, and weights in the compute dtype or, with stage 3, gradients once more.
        copies = 2 * FLOAT32_BYTES + (FLOAT32_BYTES if settings.stage == 3 else element * (1 + accumulates))
        moments = FLOAT32_BYTES * OPTIMIZERS[run.config.optim].moments
        taken += (moments + pinning("offload_optimizer") * copies) * weights
        # A buffer for the largest gradient; accumulated ones may reach beyond the rank's part by one.
        taken += (1 + accumulates) * FLOAT32_BYTES * max(run.architecture.sizes)
    if settings.on_cpu("offload_param"):
        taken += pinning("offload_param") * 2 * element * weights  # one buffer, and each weight once more
    return taken
