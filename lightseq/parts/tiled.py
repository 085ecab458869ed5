"""Decoder layers that run attention in slices of heads, and everything else in tiles of tokens.

q, k and v, and the gradient of attention's output, exist for one slice at a time, as in UPipe (arXiv 2602.21196). A
layer saves its input, and attention's out and lse unless attention is recomputed. Besides these and a slice's
attention, its backward pass holds three tensors of the local sequence: the gradient of the layer's output, which
becomes the input's in place, and the gradients of k and v. The gradient of q takes the memory of out.

Shape suffixes: B batch, S local sequence, H hidden, N heads, D head dim.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightseq.attention.module_attention import attend, context_of
from lightseq.attention.operator import attention_backward
from lightseq.kernels.attention.base import Saved
from lightseq.parts import mlp
from lightseq.parts.changes import Changes
from lightseq.parts.fp8 import MULTIPLE
from lightseq.parts.identity import change_of, is_known_code, plain_class
from lightseq.parts.low_rank import (
    LinearWeights,
    bias_of,
    concatenate_outputs,
    has_linear_weights,
    input_gradient,
    linear_weights,
)
from lightseq.parts.projections import PROJECTIONS
from lightseq.schedule.head_slices import count_head_slices
from lightseq.schedule.reach import Reach
from lightseq.utils.checkpoint_context import is_recomputing, take_memory

# Layers of norm, attention, residual, norm, MLP, residual, in which q and k may have norms of their own.
TILEABLE_LAYER_CLASSES: Final = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")

Pair = tuple[Tensor, Tensor]


def tile_layers(
    layers: Iterable[nn.Module],
    changes: Changes,
    store_attention: bool = True,
    compiled: bool = False,
    options: dict[str, Any] | None = None,
) -> None:
    """Replaces the forward of every layer by a tiled one. Raises ValueError for a layer that cannot run in tiles.

    Without `store_attention` the backward pass computes attention again. `compiled` compiles the work on a tile, with
    torch.compile's `options`.
    """
    step = partial(torch.compile, dynamic=False, options=options) if compiled else lambda function: function
    layers = list(layers)
    for layer in layers:
        _check_layer(layer)
    functions = _TileFunctions(step(project), step(finish), mlp.TILE_TOKENS, store_attention)
    for layer in layers:
        changes.set_attribute(layer, "forward", partial(_forward, functions, layer))


def check_layer_class(name: str) -> None:
    """Raises ValueError for a class of layers that cannot run in tiles."""
    if name not in TILEABLE_LAYER_CLASSES:
        supported = ", ".join(TILEABLE_LAYER_CLASSES)
        raise ValueError(f"--tile_layers supports {supported}, but this model has {name}; leave it out")


def _check_layer(layer: Any) -> None:
    """Raises ValueError for a layer that cannot run in tiles: of another class, or changed in any part.

    Tiles go around the forward of the layer and of its attention, and call the other parts once for each tile.
    """
    kind = plain_class(layer)
    check_layer_class(kind.__name__)
    attention = plain_class(layer.self_attn)
    changes = ((name, change_of(module)) for name, module in layer.named_modules() if module is not layer)
    name, change = next(((name, change) for name, change in changes if change is not None), ("", None))
    if not is_known_code(layer.forward):
        change = "has a forward of its own"
    elif attention.__module__ != kind.__module__:
        name, change = "self_attn", f"is a {attention.__module__}.{attention.__qualname__}"
    if change is not None:
        raise ValueError(
            f"--tile_layers: {name or kind.__name__} {change}, which tiles would leave out; undo that, or leave "
            "--tile_layers out"
        )


class HeadSlice(NamedTuple):
    """Weights around the attention of some key/value heads and their query heads, for use without gradients."""

    projection: LinearWeights  # joint projection to q, k and v
    bias: Tensor | None
    columns: list[int]  # columns of q, k and v
    output: LinearWeights

    def project(self, x_BSH: Tensor) -> Sequence[Tensor]:
        """Returns q, k and v (B, S, columns)."""
        if self.projection.a is None:
            return F.linear(x_BSH, self.projection.weight, self.bias).split(self.columns, dim=-1)
        qkv = self.projection.forward(x_BSH.flatten(0, 1)).unflatten(0, x_BSH.shape[:2])
        return (qkv if self.bias is None else qkv + self.bias).split(self.columns, dim=-1)


def head_slices(attention: Any, dtype: torch.dtype) -> Iterator[HeadSlice | None]:
    """Yields the slices in which heads are computed; None is one slice of all heads, with the modules' own linears.

    Every rank has the same slices in the same order. Linears that cannot be cut, as in FP8, give one slice.
    """
    linears = [getattr(attention, name) for name in PROJECTIONS]
    if not all(map(has_linear_weights, linears)):
        yield None
        return
    *qkv, output = (linear_weights(linear, dtype) for linear in linears)
    *biases, _ = map(bias_of, linears)
    heads, kv_heads = (len(linear.weight) // attention.head_dim for linear in qkv[:2])
    slices = count_head_slices(context_of(attention).schedule, heads, kv_heads, attention.head_dim)
    columns = [len(linear.weight) // slices for linear in qkv]
    for i in range(slices):
        parts = [slice(i * size, (i + 1) * size) for size in columns]
        yield HeadSlice(
            projection=concatenate_outputs(
                [linear.select_outputs(part) for linear, part in zip(qkv, parts, strict=True)]
            ),
            bias=_joined_biases([None if x is None else x[part] for x, part in zip(biases, parts, strict=True)]),
            columns=columns,
            output=output.select_inputs(parts[0]),
        )


def _joined_biases(biases: Sequence[Tensor | None]) -> Tensor | None:
    """Joins the biases of q, k and v; layers of TILEABLE_LAYER_CLASSES have all or none."""
    found = [bias for bias in biases if bias is not None]
    return torch.cat(found) if found else None


def project(
    layer: Any, x_BSH: Tensor, cos_BSD: Tensor, sin_BSD: Tensor, heads: HeadSlice | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Projects a layer's input to rotated q, k and v (B, S, N, D), for one slice of heads (None: all)."""
    attention = layer.self_attn
    rotate = sys.modules[type(attention).__module__].apply_rotary_pos_emb
    normed = layer.input_layernorm(x_BSH)
    if heads is None:
        qkv = [linear(normed) for linear in (attention.q_proj, attention.k_proj, attention.v_proj)]
    else:
        qkv = [*heads.project(normed)]
    q, k, v = (y.unflatten(-1, (-1, attention.head_dim)) for y in qkv)
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
class _TileFunctions:
    """Settings that all layers share: `project` and `finish`, compiled or not."""

    project: Callable[..., tuple[Tensor, Tensor, Tensor]]
    finish: Callable[..., Tensor]
    tile_tokens: int  # tokens of a tile, over all sequences of a batch
    store_attention: bool


@dataclass(frozen=True)
class _TiledCall:
    """One forward pass of a layer, and its backward pass."""

    functions: _TileFunctions
    layer: Any
    cos_sin: Pair  # cosines and sines of RoPE, (B, S, D) each
    others: Mapping[str, Any]  # further keyword arguments of attention

    def tiles(self, x: Tensor) -> Iterator[slice]:
        """Yields the tokens of each tile of x (B, S, ...)."""
        size = max(1, self.functions.tile_tokens // x.shape[0])
        size -= size % MULTIPLE if size > MULTIPLE else 0  # FP8 products need it
        return mlp.tiles(x.shape[1], size)

    @property
    def reach(self) -> Reach | None:
        """Returns the keys that a query of this layer sees; None: all before it."""
        reach: Reach | None = self.layer.self_attn.reach_of_mask  # set by `hf.enable`
        return reach

    def head_slices(self, x: Tensor) -> Iterator[HeadSlice | None]:
        return head_slices(self.layer.self_attn, x.dtype)

    def project_all_tiles(self, heads: HeadSlice | None, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns a slice's q, k and v of the whole local sequence."""
        whole: list[Tensor] = []
        x = x.detach()  # else the compiler compiles training and evaluation separately
        for rows in self.tiles(x):
            parts = self.functions.project(self.layer, x[:, rows], *(y[:, rows] for y in self.cos_sin), heads)
            whole = whole or [part.new_empty((*x.shape[:2], *part.shape[2:])) for part in parts]
            for to, part in zip(whole, parts, strict=True):
                to[:, rows] = part
        q, k, v = whole
        return q, k, v

    def finish_all_tiles(self, x: Tensor, outs: Sequence[Tensor]) -> Tensor:
        """Returns the layer's output from its input and the attention outputs of all slices.

        It is uninitialized memory while a checkpoint recomputes the layer, because nothing reads it then.
        """
        whole, x = torch.empty_like(x), x.detach()
        for rows in () if is_recomputing() else self.tiles(x):
            whole[:, rows] = self.functions.finish(self.layer, x[:, rows], heads_of_tile(outs, rows))
        return whole

    def attention(self, x: Tensor) -> list[Pair]:
        """Runs attention slice by slice. Returns the output and log-sum-exp of each slice."""
        module, window = self.layer.self_attn, None if self.reach is None else self.reach.tokens
        return [
            attend(module, *self.project_all_tiles(heads, x), module.scaling, sliding_window=window, **self.others)
            for heads in self.head_slices(x)
        ]

    def attention_backward(
        self, heads: HeadSlice | None, dresidual: Tensor, x: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the gradients of a slice's q, k and v."""
        module, documents = self.layer.self_attn, self.others.get("documents")
        dout = torch.empty_like(out)
        for rows in self.tiles(x):
            dout[:, rows] = out_gradient(self.layer, heads, dresidual[:, rows], out[:, rows])
        saved = Saved(*self.project_all_tiles(heads, x), out, lse)
        return attention_backward(dout, saved, context_of(module), module.scaling, documents, self.reach)


def heads_of_tile(slices: Sequence[Tensor], rows: slice) -> Tensor:
    """Returns the heads of all slices (B, S, N, D) side by side, for one tile."""
    return torch.cat([x[:, rows] for x in slices], dim=2)


def out_gradient(layer: Any, heads: HeadSlice | None, dresidual_BSH: Tensor, out_BSND: Tensor) -> Tensor:
    """Returns the gradient of attention's output for a slice of heads, from the gradient of residual plus output."""
    if heads is not None:
        dy_TH = dresidual_BSH.flatten(0, 1)
        dout_TI = dy_TH.new_empty(len(dy_TH), heads.output.weight.shape[1])
        return input_gradient([heads.output], [dy_TH], dout_TI).view(out_BSND.shape)
    out = out_BSND.detach().requires_grad_()
    with torch.enable_grad():
        y = layer.self_attn.o_proj(out.flatten(2))
    (dout,) = torch.autograd.grad(y, out, dresidual_BSH)
    return dout


class _Layer(torch.autograd.Function):
    """Tiled layer. Its backward pass runs tile by tile before and after attention's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tiled: _TiledCall, *_parameters: Tensor) -> Tensor:  # type: ignore[override]
        attended = tiled.attention(x)
        ctx.tiled = tiled
        ctx.save_for_backward(x, *(y for pair in attended for y in pair if tiled.functions.store_attention))
        return tiled.finish_all_tiles(x, [out for out, _ in attended])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        tiled, dx = ctx.tiled, take_memory(dy).contiguous()
        x, *stored = ctx.saved_tensors
        attended = list(zip(stored[::2], stored[1::2], strict=True)) or tiled.attention(x)
        outs, sums = [out for out, _ in attended], _ParameterGradients(_trained(tiled.layer))
        functions = tiled.functions
        finish_tile, project_tile = partial(functions.finish, tiled.layer), partial(functions.project, tiled.layer)
        for rows in tiled.tiles(x):  # dx becomes the gradient of the residual
            dx[:, rows] = sums.backward(finish_tile, x[:, rows], [heads_of_tile(outs, rows)], [dx[:, rows]])
        dqs, dks, dvs = outs, list[Tensor](), list[Tensor]()
        for heads, (out, lse) in zip(tiled.head_slices(x), attended, strict=True):
            dq, dk, dv = tiled.attention_backward(heads, dx, x, out, lse)
            out.copy_(dq)  # in the same memory
            dks.append(dk)
            dvs.append(dv)
            del dq, dk, dv
        for rows in tiled.tiles(x):  # and the gradient of the input
            gradients = [heads_of_tile(parts, rows) for parts in (dqs, dks, dvs)]
            dx[:, rows] += sums.backward(project_tile, x[:, rows], [y[:, rows] for y in tiled.cos_sin], gradients)
        return dx, None, *sums.cast_to_parameter_dtypes()


class _ParameterGradients:
    """Gradients of parameters, accumulated over tiles in float32 or wider."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._totals: list[Tensor | None] = [None] * len(parameters)

    def backward(
        self, function: Callable[..., Any], x: Tensor, constants: list[Tensor], gradients: list[Tensor]
    ) -> Tensor:
        """Returns the gradient of x, and adds the gradients of the parameters to the sums."""
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            made = function(x, *constants)
        dx, *found = torch.autograd.grad(made, [x, *self._parameters], gradients, allow_unused=True)
        for i, grad in enumerate(found):
            if grad is None:
                continue
            total = self._totals[i]
            if total is None:
                self._totals[i] = grad.to(torch.promote_types(grad.dtype, torch.float32))
            else:
                total += grad
        return dx

    def cast_to_parameter_dtypes(self) -> list[Tensor | None]:
        """Returns the gradients in their parameters' dtypes; None for parameters without one."""
        pairs = zip(self._totals, self._parameters, strict=True)
        return [None if total is None else total.to(parameter.dtype) for total, parameter in pairs]


def _trained(layer: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in layer.parameters() if parameter.requires_grad]


def _forward(
    functions: _TileFunctions,
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
    call = _TiledCall(functions, layer, cos_sin=position_embeddings, others=others)
    result: Tensor = _Layer.apply(hidden_states, call, *_trained(layer))
    return result
