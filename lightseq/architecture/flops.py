"""Parameter counts, FLOPs of a step, and utilization of the peak (MFU, HFU).

A multiply-add counts as two FLOPs. H: query heads, D: head dim, S: sequence length, N: parameters in matrix products.
"""

import re
from collections.abc import Iterable
from typing import Final

from transformers import PreTrainedConfig

from lightseq.architecture.inspection import inspect_architecture
from lightseq.config.recurrent_schedules import RECURRENT_SCHEDULES
from lightseq.config.remat_policies import POLICIES, STORE_LINEARS, STORE_MLP
from lightseq.parts.adapter_targets import find_targets
from lightseq.parts.adapters import Lora
from lightseq.parts.facts import Attention, Layer, LinearMixer

# Dense tensor-core peaks in FLOP/s with float32 accumulation, in bfloat16 and FP8 (None: no FP8), by torch's name
# for the device. The first matching pattern wins. Figures are from datasheets; those given with sparsity are halved.
PEAKS: Final[tuple[tuple[str, float, float | None], ...]] = (
    (r"\bB200\b", 2250e12, 4500e12),  # HGX B200 datasheet: 4.5 and 9 PFLOP/s with sparsity
    (r"\bH100 PCIe\b", 756e12, 1513e12),  # H100 datasheet, PCIe column: 1513 and 3026 with sparsity
    (r"\bH[12]00 NVL\b", 835e12, 1671e12),  # H100 and H200 datasheets, NVL columns: 1671 and 3341 with sparsity
    (r"\b(H100|H200|GH200)\b", 989e12, 1979e12),  # H100 (SXM), H200, GH200 datasheets: 1979 and 3958 with sparsity
    (r"\bA100\b", 312e12, None),  # A100 datasheet
    (r"\bL40S\b", 362e12, 733e12),  # L40S datasheet: 733 with sparsity, rounded up; FP8 733, or 1466 with sparsity
    (r"\bA10\b", 125e12, None),  # A10 datasheet
    (r"\bV100-PCIE\b", 112e12, None),  # V100 datasheet; float16, it has no bfloat16
    (r"\bV100\b", 125e12, None),  # V100 datasheet (SXM2); float16
    (r"\bT4\b", 65e12, None),  # T4 datasheet; float16, its tensor cores have no bfloat16
    # Ada architecture whitepaper, from its version 2.02 on; the laptop's and the D's differ
    (r"\bRTX 4090$", 165e12, 330e12),
)


def matmul_parameters(config: PreTrainedConfig) -> int:
    """Returns N, the weights that a token is multiplied by in the layers and in the LM head, tied or not."""
    found = inspect_architecture(config)
    return found.active + found.head


def total_parameters(config: PreTrainedConfig) -> int:
    """Returns the number of parameters; tied embeddings count once."""
    return inspect_architecture(config).total


def count_adapter_parameters(lora: Lora | None, model_config: PreTrainedConfig, active: bool = False) -> int:
    """Returns the number of adapter weights; 0 without adapters.

    With `active`, counts only adapters that a token uses: of its experts, the chosen ones.
    """
    if lora is None:
        return 0
    found = find_targets(model_config)
    linears = sum(ends for name, ends in found.linears.items() if lora.adapts(name))
    experts = sum(found.parameters[name] for name in lora.parameters)
    if active and experts:
        facts = next(layer.experts for layer in inspect_architecture(model_config).layers if layer.experts)
        experts = experts * facts.per_token // facts.count
    return lora.rank * (linears + experts)


def matrix_sizes(config: PreTrainedConfig) -> dict[str, int]:
    """Returns the sizes of a layer's weight matrices, by the names that config.json gives them."""
    found = inspect_architecture(config)
    sizes = {"hidden_size": found.layers[0].hidden, "intermediate_size": found.layers[0].intermediate}
    for attention in dict.fromkeys(found.attentions):
        of_heads = f"head_dim {attention.heads.dim}"
        sizes[f"attention heads x {of_heads}"] = attention.width
        sizes[f"key/value heads x {of_heads}"] = attention.key_width
    return sizes


def describe_experts(config: PreTrainedConfig, ranks: int) -> str | None:
    """Describes a model's experts, split over `ranks` ranks. None without experts."""
    found = inspect_architecture(config)
    kinds = dict.fromkeys(layer.experts for layer in found.layers if layer.experts)
    if not kinds:
        return None
    active = found.total - sum(layer.experts.weights - layer.experts.active for layer in found.layers if layer.experts)
    chosen = " and ".join(f"{kind.per_token} of {kind.count}" for kind in kinds)
    where = f"; --expert_parallel_size {ranks}"
    return f"{chosen} for each token, which uses {active:,} of {found.total:,} parameters{where}"


def describe_recurrences(
    config: PreTrainedConfig, schedule: str | None = None, slow_reason: str | None = None
) -> str | None:
    """Describes a model's layers without softmax attention, and their kernel on GPUs; None without such layers.

    `schedule` says how scans span several ranks, and `slow_reason` why they have no fast kernel here.
    """
    layers = inspect_architecture(config).layers
    mixers = [mixer for layer in layers for mixer in layer.linear_mixers]
    if not mixers:
        return None
    kinds = ", ".join(dict.fromkeys(mixer.kind for mixer in mixers))
    kernel = ""
    if any(mixer.scan_heads for mixer in mixers):
        kernel = "; on GPUs by flash-linear-attention, which compiles kernels in the first step on a machine"
        if slow_reason:
            kernel = f"; slowly, on matrix products of torch: {slow_reason}"
    over_ranks = f"; {RECURRENT_SCHEDULES[schedule]}" if schedule else ""
    return f"{len(mixers)} of {len(layers)} layers ({kinds}){over_ranks}{kernel}"


def attention_forward_flops(config: PreTrainedConfig, length: int, attention_share: float | None = None) -> int:
    """Returns the forward FLOPs of causal attention in all layers for one sequence.

    QKᵀ and PV take 4·S²·H·D per layer, and causal masking halves that. `attention_share` is the share of these FLOPs
    that layers need for packed documents and through windows: `Architecture.attention_area` of the documents, divided
    by S². None stands for one document.
    """
    found = inspect_architecture(config)
    share = found.attention_share(length) if attention_share is None else attention_share
    return _attention_flops(found.attentions, length, share)


def _attention_flops(mixers: Iterable[Attention], length: int, share: float) -> int:
    full = sum(mixer.pair_flops for mixer in mixers) * length**2 // 2
    return full if share == 1 else round(share * full)


def model_flops(
    config: PreTrainedConfig, length: int, sequences: int, adapters: int = 0, attention_share: float | None = None
) -> int:
    """Returns the FLOPs of one training step without recomputation: 6·N per token, plus attention.

    The backward pass of attention and of other mixers takes twice the forward. With `adapters`, frozen weights take
    4·N per token, because they get no gradient. `attention_share` is explained at `attention_forward_flops`.
    """
    linears = (4 if adapters else 6) * matmul_parameters(config) + 6 * adapters
    linears += 3 * sum(layer.linear_mixer_flops for layer in inspect_architecture(config).layers)
    attention = 3 * attention_forward_flops(config, length, attention_share)
    return sequences * (linears * length + attention)


def recompute_flops(
    config: PreTrainedConfig,
    length: int,
    sequences: int,
    remat: str,
    group: int = 1,
    tiled: bool = False,
    attention_share: float | None = None,
) -> int:
    """Returns the FLOPs that the backward pass recomputes; `model_flops` plus these are the hardware FLOPs.

    `attention` repeats the layers' linears, `full` attention too, `attention+mlp` all linears but the MLP's, and
    `attention+linears` none. The down projection is not repeated: no gradient needs its output, or, if a norm follows
    it, all policies but `full` store it. Under `full` such an MLP runs forward once more. Recomputation inside flash
    kernels is not counted. A `group` of layers that shares a checkpoint first runs forward once more; its last layer
    then stores attention's output, and skips the products that nothing reads. `tiled` layers also repeat their last
    product, and the q, k and v projections once more for attention's backward pass. MLPs are assumed to run in tiles.
    """
    assert remat in POLICIES, remat
    found = inspect_architecture(config)
    share = found.attention_share(length) if attention_share is None else attention_share
    products, attended = 0, list[Attention]()  # weights of repeated products, attention that runs again
    mixed = 0  # FLOPs per token of other mixers that run again
    for place, layer in enumerate(found.layers):
        ends_group = group == 1 or place % group == group - 1 or place == len(found.layers) - 1
        attends_again = remat == "full" and (group == 1 or not ends_group)
        if remat not in ("none", STORE_LINEARS):
            products += layer.active - layer.last_product
        if remat == STORE_MLP:
            products -= layer.stored_products
        if remat == "full" and layer.gated_mlp and not layer.mlp_is_last:
            products += 3 * layer.hidden * layer.intermediate
        if remat == STORE_LINEARS and layer.experts is not None:  # the router and shared experts
            products += layer.active - layer.experts.active - layer.projections - layer.hidden * layer.attention_width
        if tiled:
            products += layer.last_product + (1 + attends_again) * layer.projections
        if group > 1:
            products += layer.active - (skipped_products(layer, remat, tiled) if ends_group else 0)
        for mixer in layer.linear_mixers:
            mixed += mixer.token_flops * (_runs_again(mixer, remat, attends_again) + (group > 1))
        attended += layer.attentions * (attends_again + (group > 1))
    return sequences * ((2 * products + mixed) * length + _attention_flops(attended, length, share))


def _runs_again(mixer: LinearMixer, remat: str, attends_again: bool) -> bool:
    """Returns whether a layer's backward pass runs a mixer once more."""
    return attends_again if mixer.is_stored else remat != "none"


def skipped_products(layer: Layer, remat: str, tiled: bool) -> int:
    """Returns the weights whose products the last layer of a group skips in its rerun, because nothing reads them.

    A tiled layer stops after attention. Others stop before the MLP, unless a checkpoint stores gate and up.
    """
    if tiled:
        return layer.active - layer.projections
    ends_early = layer.gated_mlp and layer.mlp_is_last and remat in ("attention", "full")
    return 3 * layer.hidden * layer.intermediate if ends_early else 0


def peak_flops_per_second(device_name: str, fp8: bool = False) -> float | None:
    """Returns a device's dense peak in FP8 or bfloat16 by torch's name for the device; None if unknown."""
    return next((peaks[fp8] for pattern, *peaks in PEAKS if re.search(pattern, device_name)), None)


def mfu(step_flops: float, step_seconds: float, gpus: int, peak_flops_per_second: float | None) -> float | None:
    """Returns the share of the GPUs' total peak that a step used, from 0 to 1; None if the peak is unknown.

    `model_flops` give the model FLOPs utilization (MFU); with `recompute_flops` added, the hardware's (HFU).
    """
    if peak_flops_per_second is None:
        return None
    return step_flops / (step_seconds * gpus * peak_flops_per_second)
