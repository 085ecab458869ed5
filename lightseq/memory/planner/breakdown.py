"""What a training step holds in memory, by what it is for, and which flag makes the largest part smaller."""

from dataclasses import asdict, dataclass

from torch import nn
from transformers import PreTrainedConfig

from lightseq.config.checks import EIGHT_BIT
from lightseq.config.remat_policies import STORE_LINEARS, STORES_MLP
from lightseq.config.train_config import TrainConfig
from lightseq.distributed.mesh import local_part
from lightseq.models.architecture import heads_of
from lightseq.modules.loss import CHUNK_TOKENS

GIB = 2.0**30
MASTER_BYTES = 4  # of a weight, and of an optimizer's moment


@dataclass(frozen=True)
class Breakdown:
    """Bytes on one GPU; `working` is what a layer, its gathered weights and its gradients need on top of what stays."""

    parameters: int
    gradients: int
    optimizer: int
    kept_activations: int
    loss: int
    attention_buffers: int
    working: int

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    def lines(self) -> list[str]:
        """A table, largest part first."""
        parts = sorted(asdict(self).items(), key=lambda part: -part[1])
        shown = [(name.replace("_", " "), size) for name, size in [*parts, ("total", self.total)]]
        return [f"{name:<18}{size / GIB:9.2f} GiB" for name, size in shown]


def state_bytes(model: nn.Module, config: TrainConfig, on_host: bool) -> tuple[int, int, int]:
    """This rank's parameters, their gradients and the optimizer's state on the device, once all are there.

    AdamW has two moments, SGD here none. DeepSpeed's own are not known, and count as working memory.
    """
    if config.deepspeed:
        return 0, 0, 0
    here = [p for p in model.parameters() if not (on_host and p.device.type == "cpu")]
    parameters = sum(local_part(p).nbytes for p in here)
    gradients = sum(local_part(p).nbytes for p in here if p.requires_grad)
    return parameters, gradients, int(moments_of(config) * gradients)


def moments_of(config: TrainConfig) -> float:
    """The optimizer's state, in float32 numbers a weight."""
    return {"sgd": 0.0, **dict.fromkeys(EIGHT_BIT, 0.5)}.get(config.optim, 2.0)


def kept_activations(model: PreTrainedConfig, config: TrainConfig, tokens: int) -> int:
    """Bytes that layers keep of `tokens` local tokens until the backward pass, wherever they wait."""
    element = 4 if config.compute_dtype == "float32" else 2
    heads = heads_of(model)
    hidden, attention = model.hidden_size, heads.query * heads.dim
    group = config.layers_per_checkpoint
    if config.remat_policy == "none":
        # Input, q, k and v before and after their rotation, attention's output, gate, up and their product, two norms'
        # outputs: what eager layers save; compiled ones save less.
        key_value = heads.key_value * heads.dim
        return model.num_hidden_layers * tokens * element * (
            4 * hidden + 3 * attention + 4 * key_value + 4 * model.intermediate_size
        )  # fmt: skip
    if group == 1:
        return model.num_hidden_layers * tokens * checkpoint_bytes(model, config.remat_policy, element)
    groups = -(-model.num_hidden_layers // group)
    return tokens * (groups * hidden * element + group * checkpoint_bytes(model, config.remat_policy, element))


def checkpoint_bytes(model: PreTrainedConfig, policy: str, element: int) -> int:
    """What a checkpointed layer keeps of a token: its input, under `attention` the operator's out and lse, under
    `attention+mlp` gate and up besides, and under `attention+linears` what attention's four projections give."""
    heads = heads_of(model)
    attention = 0 if policy == "full" else heads.query * (heads.dim * element + 4)
    products = 2 * model.intermediate_size * element if policy in STORES_MLP else 0
    projections = sum(projection_widths(model)) * element if policy == STORE_LINEARS else 0
    return model.hidden_size * element + attention + products + projections


def projection_widths(model: PreTrainedConfig) -> tuple[int, int, int, int]:
    """Of q, k, v and the output."""
    heads = heads_of(model)
    return heads.query * heads.dim, heads.key_value * heads.dim, heads.key_value * heads.dim, model.hidden_size


def loss_bytes(model: PreTrainedConfig, config: TrainConfig, tokens: int) -> tuple[int, int]:
    """The logits of a chunk, and what the loss keeps: the head's gradient in float32 and that of its input."""
    element = 4 if config.compute_dtype == "float32" else 2
    logits = min(tokens, CHUNK_TOKENS) * model.vocab_size * element
    head = 0 if config.lora_rank else 4 * model.vocab_size * model.hidden_size
    return logits, head + tokens * model.hidden_size * element


def advice(parts: Breakdown, config: TrainConfig) -> str:
    """The knob that moves the largest part which a knob can move."""
    states = parts.parameters + parts.gradients + parts.optimizer
    options: list[tuple[int, str]] = []
    if config.remat_policy in ("none", *STORES_MLP):
        options.append((parts.kept_activations, "--remat attention, which recomputes layers but not attention"))
    elif config.offload not in ("activations", "both", "auto"):
        words = "both" if config.offload == "optimizer" else "activations"
        options.append((parts.kept_activations, f"--offload {words}: what layers keep waits in host memory"))
    elif config.layers_per_checkpoint == 1 and not config.deepspeed and config.offload != "auto":
        options.append((parts.kept_activations, "--layers_per_checkpoint 4, which keeps one layer's input in four"))
    if config.offload == "auto":
        options.append((parts.kept_activations, "a --device_memory_budget below what --offload auto planned with"))
    if not config.deepspeed and config.offload not in ("optimizer", "both", "auto"):
        words = "both" if config.offload == "activations" else "optimizer"
        options.append((states, f"--offload {words}: weights, gradients and optimizer state in host memory"))
    elsewhere = f"offload_optimizer and offload_param in {config.deepspeed}, " if config.deepspeed else ""
    gpus = "more GPUs on a sequence (--sequence_parallel_size), or a lower --model_max_length"
    options.append((parts.working, elsewhere + gpus))  # with DeepSpeed's own state in it
    if not config.torch_compile:
        options.append((parts.working // 2, "--torch_compile True, which fuses what eager layers write out"))
    return max(options)[1]
