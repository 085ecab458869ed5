"""What chips can do by their makers' word, and what training was measured to make of it: the constants of a plan.

Measured on NVIDIA H200 (benchmarks/results/plan-*.jsonl, docs/experiments.md); other chips are taken to reach the same
shares of their own peaks, which is an assumption.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from lightseq.models.flops import peak_flops_per_second
from lightseq.schedule.timing import RATES, Rates

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class Chip:
    """A GPU. Bytes a second are the maker's: of its memory, to the host one way, to GPUs of its host one way."""

    device: str  # as torch names it
    memory_bytes: int  # as nvidia-smi shows it
    memory_rate: float
    host_rate: float
    peer_rate: float
    capability: tuple[int, int] = (9, 0)

    @property
    def peak_flops(self) -> float:
        found = peak_flops_per_second(self.device)
        assert found is not None, self.device
        return found


# Datasheets of NVIDIA for H200, H100, A100 and L40S: HBM bandwidth; PCIe x16, Gen5 64 GB/s and Gen4 32 GB/s one way;
# NVLink one way (half of what is advertised), PCIe where there is none.
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


@dataclass(frozen=True)
class Widths:
    """Bytes for a token: so many elements for every hidden unit, attention unit (heads x head dim) and so on."""

    hidden: float = 0.0
    attention: float = 0.0
    key_value: float = 0.0
    intermediate: float = 0.0

    def elements(self, hidden: int, attention: int, key_value: int, intermediate: int) -> float:
        mine = (self.hidden, self.attention, self.key_value, self.intermediate)
        return sum(a * b for a, b in zip(mine, (hidden, attention, key_value, intermediate), strict=True))


@dataclass(frozen=True)
class LayerMoment:
    """A time in a layer's backward pass. `widths` are beyond what was kept, the weights and the operators' own."""

    widths: Widths
    in_mlp: bool = False  # what an MLP over tiles takes, too
    in_attention: bool = False  # what distributed attention takes, too


# ---- memory ---------------------------------------------------------------------------------------------------------
# By whether layers are compiled. Counted on CPU with torch's memory profiler, model sizes varied one by one: compiled
# attention between (4, 2, 4) of narrow heads and (6, 2, 2) of wide ones, its MLP from the points below.
LAYER_MOMENTS: Mapping[bool, Mapping[str, LayerMoment]] = {
    False: {
        "norms": LayerMoment(Widths(hidden=17, attention=1, key_value=2)),
        "MLP": LayerMoment(Widths(hidden=10, attention=1, key_value=2), in_mlp=True),
        "attention": LayerMoment(Widths(hidden=5, attention=2, key_value=2), in_attention=True),
    },
    True: {
        "MLP": LayerMoment(Widths(hidden=5, attention=1, key_value=2), in_mlp=True),
        "attention": LayerMoment(Widths(hidden=5, attention=2, key_value=3), in_attention=True),
    },
}
# Of layers over tiles: gradients of what goes out, until the MLP is done, and of the residual; and of attention's
# output, q, k and v, or the gradients of these (counted, eager).
TILED_MOMENTS: Mapping[str, LayerMoment] = {
    "MLP": LayerMoment(Widths(hidden=2, attention=1), in_mlp=True),
    "attention": LayerMoment(Widths(hidden=1, attention=2, key_value=2), in_attention=True),
}
TILE_HIDDEN = 10.0  # around the MLP, in a tile of a layer (assumed)
UNTILED_BUFFERS: Mapping[bool, float] = {False: 6.5, True: 5.0}  # as wide as the MLP, where it is not tiled
# With --remat none the backward pass frees as it goes: at attention, what the MLP kept is gone.
KEPT_WITHOUT_REMAT: Mapping[bool, Widths] = {
    False: Widths(hidden=8, attention=2, key_value=2, intermediate=4),
    True: Widths(hidden=4, attention=2, key_value=2, intermediate=3),
}
MOMENTS_WITHOUT_REMAT: Mapping[bool, Mapping[str, LayerMoment]] = {
    False: {
        "norms": LayerMoment(Widths(hidden=4)),
        "attention": LayerMoment(Widths(hidden=1, intermediate=-4), in_attention=True),
    },
    True: {
        "MLP": LayerMoment(Widths(hidden=1, intermediate=1)),
        "attention": LayerMoment(Widths(hidden=1, intermediate=-3), in_attention=True),
    },
}
AFTER_LAYERS: Mapping[bool, Widths] = {False: Widths(hidden=4), True: Widths(hidden=2)}  # the last norm's, at the loss
PROCESS_BYTES = 2.5 * GIB  # of a host, by every rank: Python, torch, CUDA (host_rss_bytes of the points)
OUTSIDE_BYTES = 2.0 * GIB  # of a GPU, beside torch's allocator: CUDA's context, NCCL (assumed)
SLACK = 0.05  # of the rest, lost to gaps between tensors where memory is nearly full (assumed)

# ---- time -----------------------------------------------------------------------------------------------------------
# Shares of the makers' peaks. `points`: benchmarks/results/plan-2xh200.jsonl; `traces`: 1B at 32K and 8 layers of 8B at
# 128K on two H200, read with `python3 -m analysis profile` (docs/experiments.md has the first).
MATRIX_SHARE = 0.70  # products of layers and of the loss (points; traces: 0.68 and 0.73)
ATTENTION_SHARE = 0.97  # of what the layer reaches alone, by schedule/timing.py, amid a step (points)
MEMORY_SHARE = 0.75  # bytes of memory (traces: compiled layers' glue 0.80, AdamW 0.71)
PEER_SHARE = 0.43  # a collective between GPUs, while kernels run (traces)
NETWORK_RATE = 45e9  # bytes a second to other hosts: 400 Gb/s a GPU, nine tenths of it used (assumed)
HOST_LINK_SHARE = 0.8  # copies to pinned memory and back (assumed)
# Read and written for a token, elements for every unit of width: once, and by what remat repeats. Eager layers':
# counted, and held to the kernels of a step of 1B and one of 8 layers of 8B at 32K on one H100 and the gaps in them.
GLUE: Mapping[bool, tuple[Widths, Widths]] = {
    False: (Widths(190, 48, 48, 14), Widths(45, 16, 16, 5)),
    True: (Widths(20, 6, 6, 9), Widths(6, 3, 3, 3)),
}
EAGER_TILED_MLP = 8.0  # of an eager layer's MLP over tiles, once: it is one kernel (the same steps)
FORWARD_SHARE = 0.25  # of a layer's time: backward, with what is computed again, takes three times as long (counted)
LOGIT_PASSES = 3.3  # over the logits, by the loss's own kernel (traces)
WEIGHT_COPIES = 22.0  # bytes read and written for a parameter: cast, joined, cut, forward and backward (traces)
# Bytes read and written for a parameter: counted; adamw_torch by its 11.9 ms beside the fused one's 5.1.
ADAMW_BYTES = {"adamw_torch_fused": 28, "adamw_torch": 65, "adamw_8bit": 16, "adamw_torch_8bit": 16, "sgd": 12}
NORM_BYTES, CLIP_BYTES = 4.0, 8.0  # the norm reads a gradient, clipping reads and writes it
HOST_UPDATE_RATE = 17.5e9  # bytes a second that AdamW on the host moves with one thread a rank (points), and at most
HOST_UPDATE_MOST = 135e9  # with many (16 of an H100's host: fused AdamW 140e9, clipping 131e9)
# Weights a second that a GPU updates in pieces that come from the host and go back (one H100, 587 million, five times).
PASSED_UPDATE_WEIGHTS = dict.fromkeys(("adamw_8bit", "adamw_torch_8bit"), 4.2e9)
# Of the time of a layer's products in bfloat16; and bytes read and written to cast what goes into linears and comes out
# (two runs each: 8 layers of 8B at 32K on two GPUs, 3B at 16K on one).
FP8_TIME: Mapping[str | None, float] = {None: 1.0, "rowwise": 0.57, "tensorwise": 0.54}
FP8_CAST_BYTES: Mapping[str | None, float] = {None: 0.0, "rowwise": 25.0, "tensorwise": 16.0}
LINEAR_ENDS = Widths(hidden=7, attention=2, key_value=2, intermediate=3)  # in and out of linears
# To update one weight where an optimizer takes them one by one (one run: torchao's 8-bit AdamW on 1B at 32K).
UPDATE_LAUNCH_SECONDS = {"adamw_8bit": 0.55e-3, "adamw_torch_8bit": 0.55e-3}
# To launch a layer, forward and backward. Eager: 2,048 tokens on four GPUs, docs/experiments.md; compiled: assumed.
HOST_SECONDS: Mapping[bool, float] = {False: 14e-3, True: 4e-3}
# Of the attention kernel's rate, fa4 on heads of 128: benchmarks/results/attention-*.jsonl, from 64K on (fa2: as aten).
HEAD_DIM_SHARE: Mapping[int, float] = {64: 0.86, 128: 1.0}
KERNEL_SHARE: Mapping[str, float] = {"cudnn": 0.84, "aten": 0.5, "fa2": 0.5}


def chip_named(name: str) -> Chip:
    """Raises ValueError for a name that no row has."""
    if name not in CHIPS:
        raise ValueError(f"--chip {name!r} is unknown; choose from {', '.join(CHIPS)}")
    return CHIPS[name]


def chip_of_device(device: str) -> Chip | None:
    """The row of the GPU that torch calls so."""
    exact = [chip for chip in CHIPS.values() if chip.device == device]
    alike = [chip for chip in CHIPS.values() if _model(chip.device) == _model(device)]
    return next(iter(exact + alike), None)


def _model(device: str) -> str:
    """`A100` of `NVIDIA A100-SXM4-80GB`."""
    return re.split(r"[ -]", f"{device} ")[1]


def attention_rates(chip: Chip, transport: str) -> Rates:
    """H200's, its kernel and its links scaled by what the makers say of them."""
    base = RATES[transport]
    return replace(
        base,
        flops_per_second=base.flops_per_second * chip.peak_flops / MEASURED_ON.peak_flops,
        host_bytes_per_second=base.host_bytes_per_second * chip.peer_rate / MEASURED_ON.peer_rate,
        memory_bytes_per_second=base.memory_bytes_per_second * chip.memory_rate / MEASURED_ON.memory_rate,
    )
