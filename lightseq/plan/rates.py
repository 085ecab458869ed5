"""Constants of the planner: chips from datasheets, and measured memory and speed.

Measured on NVIDIA H200 (benchmarks/results/plan-steps.jsonl, dev/LOG.md). Other chips are assumed to reach the same
shares of their peaks.
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
        from lightseq.architecture.flops import (
            peak_flops_per_second,  # imports transformers; help names chips without it
        )

        found = peak_flops_per_second(self.device)
        assert found is not None, self.device
        return found


# Memory bandwidth; PCIe x16 in one direction, 64 GB/s (Gen5) or 32 GB/s (Gen4); NVLink in one direction, half of the
# advertised rate, or PCIe for GPUs without NVLink.
CHIPS: Mapping[str, Chip] = {
    "h200": Chip("NVIDIA H200", 143_771 * MIB, 4.8e12, 64e9, 450e9),
    "h100-80gb": Chip("NVIDIA H100 80GB HBM3", 81_559 * MIB, 3.35e12, 64e9, 450e9),
    "h100-pcie": Chip("NVIDIA H100 PCIe", 81_559 * MIB, 2.0e12, 64e9, 64e9),
    "h100-nvl": Chip("NVIDIA H100 NVL", 95_830 * MIB, 3.9e12, 64e9, 300e9),
    "a100-80gb": Chip("NVIDIA A100-SXM4-80GB", 81_920 * MIB, 2.039e12, 32e9, 300e9, (8, 0)),
    "a100-40gb": Chip("NVIDIA A100-SXM4-40GB", 40_960 * MIB, 1.555e12, 32e9, 300e9, (8, 0)),
    "l40s": Chip("NVIDIA L40S", 46_068 * MIB, 0.864e12, 32e9, 32e9, (8, 9)),
    "t4": Chip("Tesla T4", 15_360 * MIB, 0.3e12, 16e9, 16e9, (7, 5)),  # PCIe Gen3
}
MEASURED_ON = CHIPS["h200"]
DEFAULT_CORES = 8  # host cores per rank; hosts of eight GPUs have more


# ---- memory ---------------------------------------------------------------------------------------------------------
# Elements of the hidden size that the last norm holds during the loss. Key, also below: whether layers are compiled.
LAST_NORM: Mapping[bool, int] = {False: 4, True: 2}
PROCESS_BYTES = 2.5 * GIB  # host memory of a rank's Python, torch and CUDA (host_rss_bytes of the points)
MARGIN = 0.08  # share of a GPU left to drivers, libraries and fragmentation (memory is planned within 5%)

# ---- time -----------------------------------------------------------------------------------------------------------
# Shares of the datasheet's peaks. Sources in parentheses: `points` is benchmarks/results/plan-steps.jsonl; `traces` are
# profiles of 1B at 32K and of 8 layers of 8B at 128K on two H200 (`python3 -m analysis profile`).
CHAIN_TIME = 1.35  # time of a scan over ranks / time of a scan on one rank (one trace, two H100)
HEADS_TIME = 2.2  # the same with exchanged heads (Qwen3.5-9B at 32K and 128K on four H200: 2.1 and 2.3)
MATRIX_SHARE = 0.70  # matrix products of layers and loss (points; traces: 0.68 and 0.73)
ATTENTION_SHARE = 0.97  # speed inside a step beside the isolated layer's (schedule/timing.py; points)
MEMORY_SHARE = 0.75  # GPU memory traffic (traces: compiled elementwise 0.80, AdamW 0.71)
PEER_SHARE = 0.43  # a collective between GPUs beside running kernels (traces)
# Share of a GPU that a collective takes from the kernels beside it (fitted to one step: Qwen3-30B-A3B on four H200
# without expert parallelism, which gathers fill; it would be 32 of 132 multiprocessors).
COLLECTIVE_SHARE = 0.24
NETWORK_RATE = 45e9  # bytes per second to other hosts: 400 Gb/s per GPU, nine tenths used (assumed)
HOST_LINK_SHARE = 0.6  # copies to and from pinned memory, fitted to the steps that tests/test_plan_steps.py reads
# Traffic of element-wise kernels over their graph's, fitted to the same steps.
ELEMENTWISE_TRAFFIC: Mapping[bool, float] = {False: 1.36, True: 1.0}
TILED_MLP: Mapping[bool, int] = {False: 8, True: 12}  # elements of its width that an MLP over tiles moves (same steps)
FORWARD_SHARE = 0.25  # share of a layer's time; backward with recomputation takes three times as long (counted)
FORWARD_AND_BACKWARD = (FORWARD_SHARE, 1 - FORWARD_SHARE)
LOGIT_PASSES = 3.3  # passes over the logits by the loss kernel (traces)
DIVERGENCE_PASSES = 30  # passes over float32 logits by both models' share of a divergence (counted)
# Bytes to cast and split weights, per byte gathered, and to cast and join gradients, per trained parameter (traces: 22
# per trained parameter with two gathers in bfloat16).
GATHER_COPIES, REDUCE_COPIES = 4.0, 6.0
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
# What linears with adapters move beside their products (counted in parts/low_rank.py). Per input: 3 elements
# forward, to multiply x by A and to join both, and 2 backward; per output 5 backward. A checkpoint that runs a linear
# again moves 3 more per input. A tiled MLP moves fewer, counted in parts/mlp.py: it copies its input twice and its
# output's gradient once, and writes the adapters' parts beside everything else.
ADAPTER_ENDS, ADAPTER_REPEATS = 5, 3
ADAPTER_MLP_HIDDEN, ADAPTER_MLP_INTERMEDIATE = 12, 7
ADAPTER_WEIGHTS = 2  # per weight, read and written to join it with B, for every product
# Launch time per tensor of optimizers that update one at a time (one run: torchao's 8-bit AdamW on 1B at 32K).
UPDATE_LAUNCH_SECONDS = {"adamw_8bit": 0.55e-3, "adamw_torch_8bit": 0.55e-3}
# Launch time of a layer, forward and backward. Eager: 2,048 tokens, four GPUs (dev/LOG.md); compiled:
# assumed.
LAYER_LAUNCH_SECONDS: Mapping[bool, float] = {False: 14e-3, True: 4e-3}
# Speed relative to fa4 with heads of 128: benchmarks/results/attention-*.jsonl from 64K on (fa2: taken as aten).
HEAD_DIM_SHARE: Mapping[int, float] = {64: 0.86, 128: 1.0}
# Speed of heads of 256 where fa4 computes both passes, relative to cuDNN's backward pass after fa4's forward pass: 377
# of 437 TFLOP/s, and 235 with a window of 1,024 (dev/LOG.md).
WITHOUT_CUDNN, WINDOW_WITHOUT_CUDNN = 0.86, 0.54
KERNEL_SHARE: Mapping[str, float] = {"cudnn": 0.84, "aten": 0.5, "fa2": 0.5}
# Bytes that the cublas kernel moves for each score, forward and backward: float32 products and 16-bit weights, written
# and read (counted in kernels/attention/cublas.py).
SCORE_BYTES = 38


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
