"""Mixers of transformers' hybrid models, recognized by the functions that their forward calls.

A recurrent module of transformers computes with functions of its modeling file: a short convolution, and a scan. Those
functions are replaced by ones that run over the ranks of a sequence if the module around them passes a `Mixing`, and
are transformers' own otherwise: models that are not enabled, such as a teacher, stay as they are.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Final
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from lightseq.attention.module_attention import unhonoured_argument
from lightseq.kernels.recurrent.base import CHUNK, ScanInputs
from lightseq.parts.facts import SCAN_PEAK_SHARE, LinearMixer
from lightseq.parts.probes import functions_of_mixer
from lightseq.recurrent.scan import scan
from lightseq.recurrent.short_convolution import ACTIVATIONS, causal_convolution
from lightseq.sequence.documents import Documents
from lightseq.sequence.group import SequenceGroup

MIXING: Final = "sequence_mixing"  # keyword in which a module's `Mixing` passes through transformers' code
NORM_EPS: Final = 1e-6  # normalizes queries and keys in all modeling files
FUSED_MAMBA: Final = "mamba2_split_conv1d_scan_combined"


@dataclass(eq=False)
class Mixing:
    """Context of one forward pass of a mixer, and the names of the functions that ran."""

    group: SequenceGroup
    schedule: str  # how the scan runs, one of RECURRENT_SCHEDULES
    documents: Documents | None
    ran: list[str] = field(default_factory=list)


# ---- functions of modeling files -------------------------------------------------------------------------------------


def short_convolution(
    mixing: Mixing,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **others: Any,
) -> Tensor:
    """Replaces `causal_conv1d_fn`: channels (B, C, S), weight (C, W)."""
    _check_keywords("causal_conv1d_fn", others)
    fused = activation if activation in ACTIVATIONS else None
    out = causal_convolution(mixing.group, hidden_states.transpose(1, 2), weight, bias, mixing.documents, fused)
    out = out if activation == fused else ACT2FN[activation](out)
    return out.transpose(1, 2)


def delta_rule(
    mixing: Mixing,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    use_qk_l2norm_in_kernel: bool = False,
    **others: Any,
) -> tuple[Tensor, None]:
    """Replaces `torch_chunk_gated_delta_rule` and `chunk_kimi_delta_attention`: (B, S, heads, dim)."""
    _check_keywords("the delta rule", others)
    if use_qk_l2norm_in_kernel:
        query, key = _normalized(query), _normalized(key)
    x = ScanInputs(query, key, value, _wide(g), beta)
    return scan(mixing.group, x, mixing.schedule, query.shape[-1] ** -0.5, mixing.documents), None


def mamba2_scan(
    mixing: Mixing,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **others: Any,
) -> Tensor:
    """Replaces `mamba2_chunk_scan`: hidden (B, S, heads, dim), dt (B, S, heads), B and C (B, S, groups, state)."""
    _check_keywords("mamba2_chunk_scan", others)
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    dt = _wide(F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    wide = _wide(hidden_states)
    x = ScanInputs(C, B, wide * dt[..., None], A.to(dt.dtype) * dt)
    out = scan(mixing.group, x, mixing.schedule, documents=mixing.documents)
    return out if D is None else out + _wide(D)[:, None] * wide


def _check_keywords(function: str, keywords: Mapping[str, Any]) -> None:
    """Raises ValueError for a keyword that would change a function's result, such as an initial state."""
    others = {name: value for name, value in keywords.items() if name != "position_embeddings"}
    if (name := unhonoured_argument(others)) is not None:
        raise ValueError(f"{function} got {name}, which is not supported over ranks; leave it out")


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _normalized(x: Tensor) -> Tensor:
    wide = _wide(x)
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + NORM_EPS)).to(x.dtype)


@dataclass(frozen=True)
class Recurrence:
    """A scan in modeling files, its replacement, and its properties for the plan."""

    replacement: Callable[..., Any]
    state_flops: int  # forward FLOPs per token and element of a head's state
    key_elements: int  # in bfloat16 that the backward pass holds, per element of a key; decays of channels are float32
    peak_share: float = SCAN_PEAK_SHARE


CONVOLUTION: Final = "causal_conv1d_fn"
# A layer of 16K tokens takes 6.3, 13.7 and 4.6 ms in both passes with fla-core 0.6 on H100 (Mamba 2: 48 heads of 128 x
# 64, the others 32 of 128 x 128). Shares are relative to the first, which a trace of a step gave.
RECURRENCES: Final[Mapping[str, Recurrence]] = {
    "torch_chunk_gated_delta_rule": Recurrence(delta_rule, state_flops=6, key_elements=4),
    "chunk_kimi_delta_attention": Recurrence(delta_rule, state_flops=6, key_elements=11, peak_share=0.0124),
    "mamba2_chunk_scan": Recurrence(mamba2_scan, state_flops=4, key_elements=4, peak_share=0.018),
}
REPLACEMENTS: Final[Mapping[str, Callable[..., Any]]] = {
    CONVOLUTION: short_convolution,
    **{name: recurrence.replacement for name, recurrence in RECURRENCES.items()},
}
# Functions that such forwards also name: for decoding with a cache, on tokens alone, or replaced below.
HARMLESS: Final = frozenset(
    {
        "apply_mask_to_padding_states", "causal_conv1d_update", "mamba2_selective_state_update",
        "recurrent_kimi_delta_attention", "torch_recurrent_gated_delta_rule", FUSED_MAMBA,
    }
)  # fmt: skip


# ---- modules ---------------------------------------------------------------------------------------------------------


def replaced_functions(kind: Any) -> tuple[str, ...]:
    """Returns the functions that a class's forward calls and that are replaced here, if it calls no unknown ones."""
    return functions_of_mixer(kind, REPLACEMENTS, HARMLESS)


def distributed_forward(self: Any, *args: Any, documents: Documents | None = None, **kwargs: Any) -> Any:
    """Runs a mixer's own forward, with functions that span the ranks of `self.sequence_group`.

    Raises ValueError if the forward did not pass its keywords on to them.
    """
    mixing = Mixing(self.sequence_group, self.recurrent_schedule, documents)
    out = self.plain_forward(*args, **kwargs, **{MIXING: mixing})
    if missing := [name for name in self.functions if name not in mixing.ran]:
        raise ValueError(
            f"{self.plain_class.__name__} does not pass its keywords to {missing[0]}, which would see one rank's "
            "tokens; use another model"
        )
    return out


def facts(module: nn.Module) -> LinearMixer:
    """Returns the plan's facts about a mixer's convolution and scan, without its linears."""
    kind: Any = getattr(type(module), "plain_class", type(module))
    functions = replaced_functions(kind)
    flops = sum(2 * conv.weight.numel() for conv in module.modules() if isinstance(conv, nn.Conv1d))
    if functions == (CONVOLUTION,):
        return LinearMixer(kind.__name__, token_flops=flops)
    found: Any = module
    recurrence = next(RECURRENCES[name] for name in functions if name in RECURRENCES)
    heads = getattr(found, "num_v_heads", None) or found.num_heads
    widths = (getattr(found, name, None) for name in ("ssm_state_size", "head_k_dim", "head_dim"))
    keys = next(width for width in widths if width is not None)
    values = getattr(found, "head_v_dim", None) or found.head_dim
    flops += recurrence.state_flops * heads * keys * values
    # Keys, values and their gradients, products inside chunks, and a state and its gradient for each chunk.
    elements = heads * (recurrence.key_elements * keys + 2 * values + CHUNK + 2 * keys * values // CHUNK)
    return LinearMixer(
        kind.__name__,
        token_flops=flops,
        token_elements=elements,
        scan_heads=heads,
        is_stored=True,
        peak_share=recurrence.peak_share,
    )


def replace_functions(kind: Any) -> None:
    """Replaces the functions of a class's modeling file by ones that look for a module's `Mixing`."""
    names = inspect.unwrap(kind.forward).__globals__
    for name in (*replaced_functions(kind), FUSED_MAMBA):
        if name in names and names[name] not in _DISPATCHING:
            names[name] = _dispatching(name, names[name])


@contextmanager
def without_kernels(model: nn.Module) -> Iterator[None]:
    """Runs transformers' mixers on torch inside the block, as if neither fla nor mamba-ssm were installed.

    transformers calls the kernels of those packages where it finds them. They round float32 to TF32, and each tunes
    itself for minutes in every dtype.
    """
    files = [vars(sys.modules[name]) for name in sorted({type(module).__module__ for module in model.modules()})]
    functions = [(file, name, file[name]) for file in files for name in (*REPLACEMENTS, FUSED_MAMBA) if name in file]
    for file, name, function in functions:
        file[name] = inspect.unwrap(function)
    try:
        yield
    finally:
        for file, name, function in functions:
            file[name] = function


def _dispatching(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    replacement = REPLACEMENTS.get(name)

    @wraps(plain)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        mixing = kwargs.pop(MIXING, None)
        if mixing is None:
            return plain(*args, **kwargs)
        if replacement is None:
            return None  # the fused kernel goes around the functions above; without it transformers calls them
        mixing.ran.append(name)
        return replacement(mixing, *args, **kwargs)

    _DISPATCHING.add(dispatch)
    return dispatch


_DISPATCHING: WeakSet[Callable[..., Any]] = WeakSet()
