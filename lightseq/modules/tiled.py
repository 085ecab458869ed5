"""Decoder layers that run everything except attention in tiles of tokens.

A layer saves its input, and attention's out and lse unless attention is recomputed. Besides attention's own memory, its
backward pass holds six tensors of the local sequence: the gradients of the layer's output, of the residual and of
attention's output, and q, k and v.

Shape suffixes: B batch, S local sequence, H hidden, N heads, D head dim.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from lightseq.attention.module_attention import attend
from lightseq.attention.operator import attention_backward
from lightseq.kernels import Saved
from lightseq.kernels.checkpoint_context import is_recomputing, take_memory
from lightseq.modules import mlp
from lightseq.modules.fp8 import MULTIPLE

# Layers of norm, attention, residual, norm, MLP, residual, in which q and k may have norms of their own.
KNOWN: Final = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")

Pair = tuple[Tensor, Tensor]


def tile_layers(
    layers: Iterable[nn.Module],
    store_attention: bool = True,
    compiled: bool = False,
    options: dict[str, Any] | None = None,
) -> None:
    """Replaces the forward of every layer by a tiled one. Raises ValueError for a class of layers not in `KNOWN`.

    `options` are those of torch.compile.
    """
    step = partial(torch.compile, dynamic=False, options=options) if compiled else lambda function: function
    tiled = _Tiled(step(project), step(finish), mlp.TILE_TOKENS, store_attention)
    for layer in layers:
        check_layer_class(type(layer).__name__)
        layer.forward = partial(_forward, tiled, layer)  # type: ignore[method-assign]


def check_layer_class(name: str) -> None:
    """Raises ValueError for a class of layers that cannot run in tiles."""
    if name not in KNOWN:
        raise ValueError(f"--tile_layers supports {', '.join(KNOWN)}, but this model has {name}; leave it out")


def project(layer: Any, x_BSH: Tensor, cos_BSD: Tensor, sin_BSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns rotated q, k and v (B, S, N, D) of a layer's input."""
    attention = layer.self_attn
    rotate = sys.modules[type(attention).__module__].apply_rotary_pos_emb
    normed = layer.input_layernorm(x_BSH)
    linears = (attention.q_proj, attention.k_proj, attention.v_proj)
    q, k, v = (linear(normed).unflatten(-1, (-1, attention.head_dim)) for linear in linears)
    if hasattr(attention, "q_norm"):
        q, k = attention.q_norm(q), attention.k_norm(k)
    q, k = rotate(q, k, cos_BSD, sin_BSD, unsqueeze_dim=2)
    return q, k, v


def finish(layer: Any, x_BSH: Tensor, out_BSND: Tensor) -> Tensor:
    """Returns a layer's output from its input and attention's output."""
    hidden = x_BSH + layer.self_attn.o_proj(out_BSND.flatten(2))
    output: Tensor = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return output


@dataclass(frozen=True)
class _Tiled:
    project: Callable[..., tuple[Tensor, Tensor, Tensor]]
    finish: Callable[..., Tensor]
    tile_tokens: int
    store_attention: bool
    layer: Any = None
    cos_sin: Pair = None  # type: ignore[assignment]
    others: Any = None  # further keyword arguments of attention

    def tiles(self, x: Tensor) -> Iterator[slice]:
        size = max(1, self.tile_tokens // x.shape[0])
        size -= size % MULTIPLE if size > MULTIPLE else 0  # FP8 products need it
        return mlp.tiles(x.shape[1], size)

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q, k and v of the whole local sequence."""
        whole: list[Tensor] = []
        x = x.detach()  # else the compiler compiles training and evaluation separately
        for rows in self.tiles(x):
            parts = self.project(self.layer, x[:, rows], *(y[:, rows] for y in self.cos_sin))
            whole = whole or [part.new_empty((*x.shape[:2], *part.shape[2:])) for part in parts]
            for to, part in zip(whole, parts, strict=True):
                to[:, rows] = part
        q, k, v = whole
        return q, k, v

    def finished(self, x: Tensor, out: Tensor) -> Tensor:
        whole, x = torch.empty_like(x), x.detach()
        for rows in () if is_recomputing() else self.tiles(x):
            whole[:, rows] = self.finish(self.layer, x[:, rows], out[:, rows])
        return whole

    def attention(self, x: Tensor) -> Pair:
        """Returns out and its log-sum-exp."""
        module = self.layer.self_attn
        window = getattr(module, "sliding_window", None)
        return attend(module, *self.projected(x), module.scaling, sliding_window=window, **self.others)

    def attention_backward(self, dout: Tensor, x: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the gradients of q, k and v."""
        module, documents = self.layer.self_attn, self.others.get("documents")
        context = module.sequence_context
        saved = Saved(*self.projected(x), out, lse)
        return attention_backward(dout, saved, context, module.scaling, documents)


class _Layer(torch.autograd.Function):
    """Tiled layer, whose backward pass runs tile by tile before and after that of attention."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tiled: _Tiled, *_parameters: Tensor) -> Tensor:  # type: ignore[override]
        out, lse = tiled.attention(x)
        ctx.tiled = tiled
        ctx.save_for_backward(x, *((out, lse) if tiled.store_attention else ()))
        return tiled.finished(x, out)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        tiled, dy = ctx.tiled, take_memory(dy)
        x, *kept = ctx.saved_tensors
        out, lse = kept or tiled.attention(x)
        sums = _Sums(_trained(tiled.layer))
        dx, dout = torch.empty_like(x), torch.empty_like(out)
        for rows in tiled.tiles(x):
            inputs = [part[:, rows].detach().requires_grad_() for part in (x, out)]
            dx[:, rows], dout[:, rows] = sums.backward(partial(tiled.finish, tiled.layer), inputs, [], [dy[:, rows]])
        del dy, inputs
        grads = tiled.attention_backward(dout, x, out, lse)
        del out, lse, kept, dout
        for rows in tiled.tiles(x):
            inputs, cos_sin = [x[:, rows].detach().requires_grad_()], [y[:, rows] for y in tiled.cos_sin]
            gradients = [grad[:, rows] for grad in grads]
            (through,) = sums.backward(partial(tiled.project, tiled.layer), inputs, cos_sin, gradients)
            dx[:, rows] += through
        return dx, None, *sums.finished()


class _Sums:
    """Gradients of parameters, accumulated over tiles in float32 or wider."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._totals: list[Tensor | None] = [None] * len(parameters)

    def backward(
        self, function: Callable[..., Any], inputs: list[Tensor], constants: list[Tensor], gradients: list[Tensor]
    ) -> list[Tensor]:
        """Returns gradients of the inputs, and adds those of the parameters to the sums."""
        with torch.enable_grad():
            made = function(*inputs, *constants)
        wanted = [*inputs, *self._parameters]
        found = torch.autograd.grad(made, wanted, gradients, allow_unused=True)
        for i, grad in enumerate(found[len(inputs) :]):
            if grad is None:
                continue
            total = self._totals[i]
            if total is None:
                self._totals[i] = grad.to(torch.promote_types(grad.dtype, torch.float32))
            else:
                total += grad
        return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(inputs, found, strict=False)]

    def finished(self) -> list[Tensor | None]:
        pairs = zip(self._totals, self._parameters, strict=True)
        return [None if total is None else total.to(parameter.dtype) for total, parameter in pairs]


def _trained(layer: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in layer.parameters() if parameter.requires_grad]


def _forward(
    tiled: _Tiled,
    layer: nn.Module,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values: Any = None,
    use_cache: bool = False,
    position_embeddings: Pair | None = None,
    **others: Any,
) -> Tensor:
    """Runs a decoder layer in tiles, with the arguments that transformers passes."""
    if past_key_values is not None:
        raise ValueError("tiled layers do not support a key/value cache; pass use_cache=False")
    assert position_embeddings is not None, "the model passes position embeddings"
    this = replace(tiled, layer=layer, cos_sin=position_embeddings, others=others)
    result: Tensor = _Layer.apply(hidden_states, this, *_trained(layer))
    return result
