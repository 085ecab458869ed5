"""How many parameters a model has, how many floating-point operations a step takes, and what share of the peak that is.

A multiplication and an addition are two operations (FLOPs). L layers, h hidden, H query heads, K key/value heads,
D head dim, i intermediate, V vocabulary, S the length of a sequence, N the parameters that are multiplied by.
"""

import re
from math import ceil
from typing import Final

from transformers import PreTrainedConfig

from lightseq.config.remat_policies import POLICIES, STORE_LINEARS, STORE_MLP
from lightseq.models.architecture import inspect_architecture

# Dense peaks of the tensor cores in bfloat16 and in FP8 (None: it has none), both with float32 accumulation, FLOP/s,
# by the name that torch reports for the device. The first pattern that matches counts. Figures are the makers'; those
# given with sparsity are halved, so that the FP8 peak is what the datasheet gives for bfloat16 with sparsity.
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
    # Ada architecture whitepaper, from its version 2.02 on; the laptop's and the D's differ
    (r"\bRTX 4090$", 165e12, 330e12),
)


def matmul_parameters(config: PreTrainedConfig) -> int:
    """N, the weights every token is multiplied by: the layers' linears and the LM head, tied or not; no lookup."""
    found = inspect_architecture(config)
    return found.layer_linears + found.head


def total_parameters(config: PreTrainedConfig) -> int:
    """Every parameter, counted once: N, the biases, the norms, and the embeddings unless they are the LM head too."""
    return inspect_architecture(config).total


def attention_forward_flops(config: PreTrainedConfig, length: int) -> int:
    """Causal attention of one sequence over all layers, forward: QKᵀ and PV are 4·S²·H·D, half of which is masked."""
    found = inspect_architecture(config)
    return found.layers * 2 * length**2 * found.heads.query * found.heads.dim


def model_flops(
    config: PreTrainedConfig, length: int, sequences: int, adapters: int = 0, attention_share: float = 1.0
) -> int:
    """FLOPs of one training step, no recompute: 6·N a token, and attention with a backward of twice the forward.

    Of weights that only `adapters` train beside, 4·N a token: they get no gradient. `attention_share` is what documents
    packed into a sequence need of its attention: the squares of their lengths.
    """
    linears = (4 if adapters else 6) * matmul_parameters(config) + 6 * adapters
    attention = round(attention_share * 3 * attention_forward_flops(config, length))
    return sequences * (linears * length + attention)


def recompute_flops(
    config: PreTrainedConfig,
    length: int,
    sequences: int,
    remat: str,
    group: int = 1,
    tiled: bool = False,
    attention_share: float = 1.0,
) -> int:
    """FLOPs that the backward pass repeats, to be added to `model_flops` for the hardware's count.

    `attention` repeats the layers' linears, `full` attention too, `attention+mlp` all but the MLP's, and
    `attention+linears` none. The down projection is never repeated: it ends its layer, and no gradient needs what it
    gives out. What flash kernels repeat inside is not counted.
    Of a `group` of layers that shares a checkpoint all run forward once more before that; the last one then keeps
    what attention gives, and ends where nobody reads the rest. Layers that are `tiled` repeat their last product too,
    and the projections to q, k and v once more, for attention's backward pass. MLPs are taken to run over tiles.
    """
    assert remat in POLICIES, remat
    found = inspect_architecture(config)
    repeated = 0 if remat in ("none", STORE_LINEARS) else found.layer_linears - found.ending_linears
    if remat == STORE_MLP:
        repeated -= found.layers * 2 * config.hidden_size * config.intermediate_size
    lasts = ceil(found.layers / group) if group > 1 else 0
    attended = found.layers - lasts if remat == "full" else 0  # layers whose attention is computed again
    projections = projection_weights(config)
    if tiled:
        repeated += found.ending_linears + (found.layers + attended) * projections
    if group > 1:
        attended += found.layers
        repeated += found.layer_linears - lasts * skipped_matmul_weights(config, remat, tiled)
    attention = attention_forward_flops(config, length) * attended // found.layers
    return sequences * (2 * repeated * length + round(attention_share * attention))


def projection_weights(config: PreTrainedConfig) -> int:
    """Of one layer: those that make q, k and v."""
    heads = inspect_architecture(config).heads
    weights: int = config.hidden_size * heads.dim * (heads.query + 2 * heads.key_value)
    return weights


def skipped_matmul_weights(config: PreTrainedConfig, remat: str, tiled: bool) -> int:
    """Of the last layer of a group that runs again: weights of linears whose products are not made, for nobody reads
    them. Over tiles it ends with attention, else without its MLP, unless a checkpoint keeps gate and up."""
    found = inspect_architecture(config)
    if tiled:
        return found.layer_linears // found.layers - projection_weights(config)
    ends_early = found.can_store_mlp and remat in ("attention", "full")
    return 3 * config.hidden_size * config.intermediate_size if ends_early else 0


def peak_flops_per_second(device_name: str, fp8: bool = False) -> float | None:
    """Dense peak of a device, in FP8 or in bfloat16, by the name torch gives it; None where it is not known."""
    return next((peaks[fp8] for pattern, *peaks in PEAKS if re.search(pattern, device_name)), None)


def mfu(step_flops: float, step_seconds: float, gpus: int, peak_flops_per_second: float | None) -> float | None:
    """Share of the GPUs' joint peak that a step used, from 0 to 1; None where the peak is not known.

    With `model_flops` it is the model's utilisation (MFU); with `recompute_flops` added, the hardware's (HFU).
    """
    if peak_flops_per_second is None:
        return None
    return step_flops / (step_seconds * gpus * peak_flops_per_second)
