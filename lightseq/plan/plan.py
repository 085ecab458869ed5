"""Plan of a training run: memory, step time, and the placement of each layer's activations and state.

Nothing is built or run. Sizes follow from the model's config and the flags, rates from rates.py.
"""

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

from lightseq.architecture.flops import count_adapter_parameters, mfu, model_flops
from lightseq.config.train_config import TrainConfig
from lightseq.distributed.host_memory import host_bytes_for_layers
from lightseq.memory.offload import layers_in_flight
from lightseq.memory.placement import (
    KEEP,
    OFFLOAD,
    RECOMPUTE,
    RECOMPUTE_OFFLOAD,
    ActionCost,
    Placement,
    in_order,
    place,
)
from lightseq.parts.facts import Layer
from lightseq.plan.breakdown import GIB, Breakdown
from lightseq.plan.memory import (
    host_bytes,
    offloaded_by_rerun,
    peak,
    saved_by_groups,
    saved_by_layer,
    state_bytes_on_host,
)
from lightseq.plan.rates import FORWARD_AND_BACKWARD, MARGIN, PROCESS_BYTES
from lightseq.plan.run import PlannedRun
from lightseq.plan.step_time import attention_seconds, layer_seconds, step_seconds
from lightseq.plan.transfers import host_link

PLANNED_FLAGS: Final = (
    *("torch_compile", "remat", "layers_per_checkpoint", "tile_layers", "offload", "expert_parallel_size"),
)
PROHIBITIVE_SECONDS = 1e6  # per layer; more than any step takes


@dataclass(frozen=True)
class Plan:
    """Predicted memory and time of a run. `parts` is one GPU at its peak, `host_bytes` one host with all its ranks."""

    run: PlannedRun
    placement: Placement
    when: str  # point of the step where memory peaks
    parts: Breakdown
    host_bytes: float

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Returns the seconds of a step by part. The search for the longest sequence does not need them."""
        return step_seconds(self.run, self.placement)

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def tokens_per_second(self) -> float:
        return self.run.config.model_max_length * self.run.sequences_per_step / self.step_seconds

    @property
    def mfu(self) -> float:
        run, hardware = self.run, self.run.hardware
        length, sequences = run.config.model_max_length, run.sequences_per_step
        adapters = count_adapter_parameters(run.lora, run.model, active=True)
        flops = model_flops(run.model, length, sequences, adapters, run.attention_share)
        share = mfu(flops, self.step_seconds, hardware.gpus, hardware.chip.peak_flops)
        assert share is not None
        return share

    @cached_property
    def missing(self) -> dict[str, float]:
        """Returns the bytes that the plan lacks on a `GPU` or a `host`."""
        usable = {"GPU": usable_gpu_bytes(self.run), "host": self.run.hardware.host_memory}
        taken = {"GPU": self.parts.total, "host": self.host_bytes}
        return {name: taken[name] - usable[name] for name in usable if taken[name] > usable[name]}

    @property
    def fits(self) -> bool:
        return not self.missing

    @property
    def shortages(self) -> tuple[str, ...]:
        """Returns texts such as `GPU memory, by 1.5 GiB per GPU`."""
        return tuple(f"{name} memory, by {size / GIB:.1f} GiB per {name}" for name, size in self.missing.items())

    def to_json(self) -> dict[str, Any]:
        """Returns the choices and sizes for run.json, from which a resumed run takes the choices again."""
        run, config = self.run, self.run.config
        return {
            **{name: getattr(config, name) for name in PLANNED_FLAGS},
            "placement": list(self.placement.layers),
            "state_offloaded": run.state_offloaded,
            "layers_with_state_on_gpu": run.layers_with_state_on_gpu,
            "reshard_after_forward": run.reshard_after_forward,
            "gpu_bytes": self.parts.total,
            "host_bytes_per_rank": int(self.host_bytes / run.hardware.ranks_per_host),
            "step_seconds": self.step_seconds,
            "documents": run.documents
            and {"mean_tokens": run.documents.mean_tokens, "attention_share": run.attention_share},
        }

    def __str__(self) -> str:
        """Returns a text such as `compiled layers, remat none; 28.4 of 73.3 GiB per GPU`."""
        run, config = self.run, self.run.config
        parts = layer_flags(config)
        parts += [self.placement.text] if set(self.placement.layers) != {KEEP} else []
        parts += [] if run.reshard_after_forward else ["gathered weights kept"]
        parts += [f"weights and state{owners_of_offloaded_state(run)} in host memory"] if run.state_on_host else []
        usable = f" of {usable_gpu_bytes(run) / GIB:.1f}" if math.isfinite(usable_gpu_bytes(run)) else ""
        sizes = [f"{self.parts.total / GIB:.1f}{usable} GiB per GPU"]
        offloads = self.placement.offloads or run.state_on_host
        sizes += [f"{self.host_bytes / GIB:,.0f} GiB per host"] if offloads else []
        return f"{', '.join(parts)}; {', '.join(sizes)}"


def layer_flags(config: TrainConfig) -> list[str]:
    """Returns texts that say how layers are compiled and checkpointed, such as `compiled layers` and `remat none`."""
    texts = ["compiled layers" if config.compiles else "layers not compiled", f"remat {config.remat_policy}"]
    texts += [f"{config.group_size} layers per checkpoint"] if config.group_size > 1 else []
    texts += ["tiled layers"] if config.tiles_layers else []
    return texts


def owners_of_offloaded_state(run: PlannedRun) -> str:
    """Returns ` of` and the parts of the model with state on the host; empty if that is the whole model."""
    resident = run.layers_with_state_on_gpu
    if not resident:
        return ""
    layers = f"layers {resident}-{len(run.layers) - 1}, " if resident < len(run.layers) else ""
    return f" of {layers}embeddings and head"


def plan_as_given(run: PlannedRun, placement: Placement | None = None) -> Plan:
    """Plans a run without moving its state. The placement of layers is given, or follows from the flags."""
    placement = placement or placement_of(run)
    snapshot = peak(run, placement)
    host = host_bytes(run, placement) * run.hardware.ranks_per_host
    return Plan(run, placement, snapshot.when, snapshot.parts, host)


def usable_gpu_bytes(run: PlannedRun) -> float:
    """Returns the GPU memory that a plan may fill; the margin is for drivers, libraries and fragmentation."""
    free = run.hardware.gpu_memory * (1 - MARGIN)
    budget = run.config.device_memory_budget
    return free if budget is None else min(free, budget * GIB)


def without_device_budget(run: PlannedRun) -> PlannedRun:
    """Replaces `--device_memory_budget`, which only `--offload auto` accepts, by a smaller GPU."""
    if run.config.device_memory_budget is None:
        return run
    usable = usable_gpu_bytes(run)
    return on_smaller_gpus(run.changed(config=replace(run.config, device_memory_budget=None)), usable)


def on_smaller_gpus(run: PlannedRun, usable: float) -> PlannedRun:
    """Returns the run on GPUs with `usable` bytes for the plan."""
    return run.changed(hardware=replace(run.hardware, gpu_memory=usable / (1 - MARGIN)))


def placement_of(run: PlannedRun) -> Placement:
    """Returns the placement that the flags ask for; with `--offload auto` the fastest that fits."""
    resident, offloaded = (RECOMPUTE, RECOMPUTE_OFFLOAD) if run.config.remat_policy == "full" else (KEEP, OFFLOAD)
    if run.config.offload == "auto":
        return _fastest(run)
    if run.config.offload not in ("activations", "both"):
        return Placement((resident,) * len(run.layers))
    return _offload_first_layers(run, resident, offloaded)


def _fastest(run: PlannedRun) -> Placement:
    usable, costs, found = usable_gpu_bytes(run), layer_costs(run), []
    kept = Placement((KEEP,) * len(run.layers))
    everything = [cost[KEEP].device_bytes for cost in costs]
    room = usable - peak(run, kept).parts.total + sum(everything)
    compute = layer_seconds(run, kept)
    hidden_by, flying = [share * compute for share in FORWARD_AND_BACKWARD], layers_in_flight(run.config.tiles_layers)
    while (spread := place(costs, room, _host_budget(run), flying, hidden_by)) is not None:
        over = peak(run, spread).parts.total - usable
        if over <= 0:
            found.append(spread)
            break
        contiguous = in_order(Counter(spread.layers))  # the layers that stay are done before gradients accumulate
        if not found and contiguous != spread and peak(run, contiguous).parts.total <= usable:
            found.append(contiguous)
        room -= max(over, min(everything) / 4)  # memory peaks later, when gradients have accumulated
    if found:
        return min(found, key=lambda placement: sum(step_seconds(run, placement).values()))
    return _offload_first_layers(run, RECOMPUTE, RECOMPUTE_OFFLOAD)


def _offload_first_layers(run: PlannedRun, resident: str, offloaded: str) -> Placement:
    """Offloads as many groups of layers as host memory allows, starting at the first; the last is never offloaded."""
    room, groups = _host_budget(run), 0
    sizes = saved_by_groups(run, Placement((offloaded,) * len(run.layers)))
    if run.group_size > 1:  # offloaded while a group runs again
        room -= offloaded_by_rerun(run, offloaded)
    while groups < run.groups - 1 and (room := room - sizes[groups]) >= 0:
        groups += 1
    return Placement(tuple(offloaded if i // run.group_size < groups else resident for i in range(len(run.layers))))


def layer_costs(run: PlannedRun) -> list[dict[str, ActionCost]]:
    """Returns the cost of each layer by action."""
    # Under other policies more than attention is recomputed, and its time is not known. `place` then recomputes only if
    # nothing else fits, and the search for a plan (make_plan.py) drops such a placement.
    again = attention_seconds(run)[0] if run.config.remat_policy == "attention" else PROHIBITIVE_SECONDS
    return [_costs_of(run, layer, again) for layer in run.layers]


def _costs_of(run: PlannedRun, layer: Layer, again: float) -> dict[str, ActionCost]:
    everything, layer_input = saved_by_layer(run, layer, KEEP), saved_by_layer(run, layer, RECOMPUTE)
    copy, copy_input = everything / host_link(run), layer_input / host_link(run)
    again *= len(layer.attentions)
    return {
        KEEP: ActionCost(device_bytes=everything, host_bytes=0.0, seconds=0.0),
        OFFLOAD: ActionCost(device_bytes=0.0, host_bytes=everything, seconds=0.0, copy_seconds=copy),
        RECOMPUTE: ActionCost(device_bytes=layer_input, host_bytes=0.0, seconds=again),
        RECOMPUTE_OFFLOAD: ActionCost(device_bytes=0.0, host_bytes=layer_input, seconds=again, copy_seconds=copy_input),
    }


def _host_budget(run: PlannedRun) -> float:
    """Returns the bytes that the layers of one rank may offload."""
    free = run.hardware.host_memory / run.hardware.ranks_per_host - PROCESS_BYTES
    budget = run.config.host_memory_budget
    if budget is None:
        return host_bytes_for_layers(free, state_bytes_on_host(run))
    if run.config.offload == "auto":  # never plans beyond the host
        return min(budget * GIB, max(0.0, free - state_bytes_on_host(run)))
    return budget * GIB
