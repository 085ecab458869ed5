"""Constants of the planner: chips from datasheets, and measured memory and speed.

Measured on NVIDIA H200 (benchmarks/results/plan-*.jsonl, docs/log.md). Other chips are assumed to reach the same shares
of their peaks.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from lightseq.schedule.timing import RATES, Rates

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class Chip:
    """A GPU. Rates are bytes per second from the datasheet: its memory, one way to the host, one way to its peers."""

    device: str  # as torch names it
    memory_bytes: int  # as nvidia-smi shows it
    memory_rate: float
    host_rate: float
    peer_rate: float
    capability: tuple[int, int] = (9, 0)

    @property
    def peak_flops(self) -> float:
        from lightseq.models.flops import peak_flops_per_second  # imports transformers; help names chips without it

        found = peak_flops_per_second(self.device)
        assert found is not None, self.device
        return found


# HBM bandwidth; PCIe x16 in one direction, 64 GB/s (Gen5) or 32 GB/s (Gen4); NVLink in one direction, half of the
# advertised rate, or PCIe for GPUs without NVLink.
CHIPS: Mapping[str, Chip] = {
    "h200": Chip("NVIDIA H200", 143_771 * MIB, 4.8e12, 64e9, 450e9),
    "h100-80gb": Chip("NVIDIA H100 80GB HBM3", 81_559 * MIB, 3.35e12, 64e9, 450e9),
    "h100-pcie": Chip("NVIDIA H100 PCIe", 81_559 * MIB, 2.0e12, 64e9, 64e9),
    "h100-nvl": Chip("NVIDIA H100 NVL", 95_830 * MIB, 3.9e12, 64e9, 300e9),
    "a100-80gb": Chip("NVIDIA A100-SXM4-80GB", 81_920 * MIB, 2.039e12, 32e9, 300e9, (8, 0)),
    "a100-40gb": Chip("NVIDIA A100-SXM4-40GB", 40_960 * MIB, 1.555e12, 32e9, 300e9, (8, 0)),
    "l40s": Chip("NVIDIA L40S", 46_068 * MIB, 0.864e12, 32e9, 32e9, (8, 9)),
}
MEASURED_ON = CHIPS["h200"]
DEFAULT_CORES = 8  # host cores per rank; hosts of eight GPUs have more


@dataclass(frozen=True)
class Widths:
    """Elements per token in units of the hidden size, attention (heads x head dim), key/value heads and MLP size.

    A model's own sizes are `Widths` too; `dot` of the two is the number of elements per token.
    """

    hidden: float = 0.0
    attention: float = 0.0
    key_value: float = 0.0
    intermediate: float = 0.0

    def dot(self, sizes: "Widths") -> float:
        return (
            self.hidden * sizes.hidden
            + self.attention * sizes.attention
            + self.key_value * sizes.key_value
            + self.intermediate * sizes.intermediate
        )


@dataclass(frozen=True)
class BackwardPoint:
    """A point of a layer's backward pass where memory may peak.

    `widths` counts temporaries other than saved activations, weights and the operators' own allocations.
    """

    widths: Widths
    in_mlp: bool = False  # adds what the tiled MLP allocates
    in_attention: bool = False  # adds what distributed attention allocates


# ---- memory ---------------------------------------------------------------------------------------------------------
# Keys: whether layers are compiled. Counted on CPU with torch's memory profiler, varying one model size at a time.
# Compiled attention is between (4, 2, 4) for narrow and (6, 2, 2) for wide heads; compiled MLP is fitted to the points.
BACKWARD_POINTS: Mapping[bool, Mapping[str, BackwardPoint]] = {
    False: {
        "norms": BackwardPoint(Widths(hidden=17, attention=1, key_value=2)),
        "MLP": BackwardPoint(Widths(hidden=10, attention=1, key_value=2), in_mlp=True),
        "attention": BackwardPoint(Widths(hidden=5, attention=2, key_value=2), in_attention=True),
    },
    True: {
        "MLP": BackwardPoint(Widths(hidden=5, attention=1, key_value=2), in_mlp=True),
        "attention": BackwardPoint(Widths(hidden=5, attention=2, key_value=3), in_attention=True),
    },
}
TILE_HIDDEN = 10.0  # hidden-wide buffers around the MLP in a tile of a layer (assumed)
UNTILED_MLP_BUFFERS: Mapping[bool, float] = {False: 6.5, True: 5.0}  # MLP-wide buffers of an MLP that is not tiled
SAVED_WITHOUT_REMAT: Mapping[bool, Widths] = {
    False: Widths(hidden=8, attention=2, key_value=2, intermediate=4),
    True: Widths(hidden=4, attention=2, key_value=2, intermediate=3),
}
# With --remat none the MLP's saved tensors are freed before attention's backward pass (negative widths).
POINTS_WITHOUT_REMAT: Mapping[bool, Mapping[str, BackwardPoint]] = {
    False: {
        "norms": BackwardPoint(Widths(hidden=4)),
        "attention": BackwardPoint(Widths(hidden=1, intermediate=-4), in_attention=True),
    },
    True: {
        "MLP": BackwardPoint(Widths(hidden=1, intermediate=1)),
        "attention": BackwardPoint(Widths(hidden=1, intermediate=-3), in_attention=True),
    },
}
LAST_NORM: Mapping[bool, Widths] = {False: Widths(hidden=4), True: Widths(hidden=2)}  # held during the loss
PROCESS_BYTES = 2.5 * GIB  # host memory of a rank's Python, torch and CUDA (host_rss_bytes of the points)
MARGIN = 0.08  # share of a GPU left to drivers, libraries and fragmentation (memory is planned within 5%)

# ---- time -----------------------------------------------------------------------------------------------------------
# Shares of the datasheet's peaks. `points`: benchmarks/results/plan-2xh200.jsonl. `traces`: 1B at 32K and 8 layers of
# 8B at 128K on two H200, read with `python3 -m analysis profile` (docs/log.md has the first).
MATRIX_SHARE = 0.70  # matrix products of layers and loss (points; traces: 0.68 and 0.73)
ATTENTION_SHARE = 0.97  # of the isolated layer's speed (schedule/timing.py) inside a step (points)
MEMORY_SHARE = 0.75  # GPU memory traffic (traces: compiled elementwise 0.80, AdamW 0.71)
PEER_SHARE = 0.43  # a collective between GPUs beside running kernels (traces)
NETWORK_RATE = 45e9  # bytes per second to other hosts: 400 Gb/s per GPU, nine tenths used (assumed)
HOST_LINK_SHARE = 0.8  # copies to and from pinned memory (assumed)
# Elements that norms, rotation and activation read and write per token: always, and again under remat. Eager values are
# counted, and checked against the kernels of a step of 1B and of 8 layers of 8B at 32K on one H100.
ELEMENTWISE: Mapping[bool, tuple[Widths, Widths]] = {
    False: (Widths(190, 48, 48, 14), Widths(45, 16, 16, 5)),
    True: (Widths(20, 6, 6, 9), Widths(6, 3, 3, 3)),
}
# Of these, the forward pass of a norm (counted): layers under --tile_layers repeat one for every group of heads.
NORM: Mapping[bool, Widths] = {False: Widths(hidden=18), True: Widths(hidden=2)}
EAGER_TILED_MLP = 8.0  # replaces the MLP's width above if it is tiled, which is one kernel (the same steps)
FORWARD_SHARE = 0.25  # of a layer's time; backward with recomputation takes three times as long (counted)
LOGIT_PASSES = 3.3  # passes over the logits by the loss kernel (traces)
# Bytes per parameter to cast and split gathered weights, and to cast and join gradients (traces: 22 with two gathers).
GATHER_COPIES, REDUCE_COPIES = 8.0, 6.0
# Bytes per parameter and update: counted; adamw_torch scaled from the fused one by its time (11.9 against 5.1 ms).
OPTIMIZER_BYTES = {"adamw_torch_fused": 28, "adamw_torch": 65, "adamw_8bit": 16, "adamw_torch_8bit": 16, "sgd": 12}
NORM_BYTES, CLIP_BYTES = 4.0, 8.0  # per gradient: the norm reads it, clipping reads and writes it
HOST_UPDATE_RATE = 17.5e9  # bytes per second and core of AdamW on the host (points) ...
HOST_UPDATE_MAX = 135e9  # ... and at most (16 cores beside an H100: fused AdamW 140e9, clipping 131e9)
# Parameters per second that a GPU updates while their state streams through it (one H100, 587 million, five times).
STREAMED_UPDATE_RATE = dict.fromkeys(("adamw_8bit", "adamw_torch_8bit"), 4.2e9)
# Time of a layer's products relative to bfloat16, and bytes moved to cast inputs and outputs of linears (two runs each:
# 8 layers of 8B at 32K on two GPUs, 3B at 16K on one).
FP8_TIME: Mapping[str | None, float] = {None: 1.0, "rowwise": 0.57, "tensorwise": 0.54}
FP8_CAST_BYTES: Mapping[str | None, float] = {None: 0.0, "rowwise": 25.0, "tensorwise": 16.0}
LINEAR_ENDS = Widths(hidden=7, attention=2, key_value=2, intermediate=3)  # inputs and outputs of all linears
# What linears with adapters move beside their products (counted in modules/low_rank.py). Per input: 3 elements
# forward, to multiply x by A and to join both, and 2 backward; per output 5 backward. A checkpoint that runs a linear
# again moves 3 more per input.
ADAPTER_ENDS, ADAPTER_REPEATS = 5, 3
REPEATED_INPUTS: Mapping[str, Widths] = {
    "attention": Widths(hidden=5, attention=1),
    "full": Widths(hidden=5, attention=1),
    "attention+mlp": Widths(hidden=3, attention=1),
}
LINEAR_INPUTS = Widths(hidden=5, attention=1, intermediate=1)
ADAPTER_WEIGHTS = 2  # per weight, read and written to join it with B, for every product
# Launch time per tensor of optimizers that update one at a time (one run: torchao's 8-bit AdamW on 1B at 32K).
UPDATE_LAUNCH_SECONDS = {"adamw_8bit": 0.55e-3, "adamw_torch_8bit": 0.55e-3}
# Launch time of a layer, forward and backward. Eager: 2,048 tokens, four GPUs (docs/log.md); compiled:
# assumed.
LAYER_LAUNCH_SECONDS: Mapping[bool, float] = {False: 14e-3, True: 4e-3}
# Speed relative to fa4 with heads of 128: benchmarks/results/attention-*.jsonl from 64K on (fa2: taken as aten).
HEAD_DIM_SHARE: Mapping[int, float] = {64: 0.86, 128: 1.0}
KERNEL_SHARE: Mapping[str, float] = {"cudnn": 0.84, "aten": 0.5, "fa2": 0.5}


def tiled_points(head_slices: int, runs_again: bool) -> Mapping[str, BackwardPoint]:
    """Returns the points of layers under --tile_layers (eager, counted).

    All hold the gradient of the layer's output. Attention also holds q, k, v and the gradient of its output for one
    head slice, and the gradients of k and v of the slices before it. If a group of layers first runs forward again
    (`runs_again`), the output of a layer is there too.
    """
    around_attention = Widths(hidden=1, attention=2 / head_slices, key_value=2)
    return {
        "MLP": BackwardPoint(Widths(hidden=1 + runs_again), in_mlp=True),
        "attention": BackwardPoint(around_attention, in_attention=True),
    }


def chip_named(name: str) -> Chip:
    """Returns a chip by its --chip name. Raises ValueError for an unknown one."""
    if name not in CHIPS:
        raise ValueError(f"--chip {name!r} is unknown; choose from {', '.join(CHIPS)}")
    return CHIPS[name]


def chip_of_device(device: str) -> Chip | None:
    """Returns the chip with torch's device name, or else one of the same model: `A100` of `NVIDIA A100-SXM4-80GB`."""

    def model(name: str) -> str:
        return re.split(r"[ -]", f"{name} ")[1]

    exact = [chip for chip in CHIPS.values() if chip.device == device]
    same_model = [chip for chip in CHIPS.values() if model(chip.device) == model(device)]
    return next(iter(exact + same_model), None)


def attention_rates(chip: Chip, transport: str) -> Rates:
    """Scales the H200's kernel and links by the datasheets of both chips."""
    base = RATES[transport]
    return replace(
        base,
        flops_per_second=base.flops_per_second * chip.peak_flops / MEASURED_ON.peak_flops,
        host_bytes_per_second=base.host_bytes_per_second * chip.peer_rate / MEASURED_ON.peer_rate,
        memory_bytes_per_second=base.memory_bytes_per_second * chip.memory_rate / MEASURED_ON.memory_rate,
    )
