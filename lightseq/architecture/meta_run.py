"""Facts about a model, found by running its own code on the meta device, where no tensor has values."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lightseq.attention.context import one_rank_context
from lightseq.attention.module_attention import unhonoured_argument
from lightseq.kernels.grouped_products import PRODUCT_OP
from lightseq.models.decoder import attending_part, headless, text_config
from lightseq.parts.attention import IMPLEMENTATION, attend_with
from lightseq.parts.changes import Changes
from lightseq.parts.experts import experts_modules
from lightseq.parts.facts import Attention, Experts, Heads, LinearMixer, Mixer
from lightseq.parts.fit import fit
from lightseq.parts.part import Choices, Ranks
from lightseq.parts.recurrences import mixer_modules
from lightseq.schedule.reach import sliding

PROBE: Final = f"{IMPLEMENTATION}_probe"  # in transformers' registry of attention functions
TOKENS: Final = 4
RANDOM: Final = ("rand", "uniform", "bernoulli", "exponential", "multinomial", "normal_", "dropout")  # operators
NOT_COMPARED: Final = ("hidden_states", "attention_mask")  # may differ between layers


@dataclass
class LayerRun:
    """Record of one layer in a forward pass on the meta device."""

    mixers: list[Mixer] = field(default_factory=list)
    linears: list[nn.Linear] = field(default_factory=list)  # in the order in which they ran
    products: int = 0  # multiplications of matrix products
    experts: Experts | None = None
    saved_after_mlp: int = 0  # tensors saved for backward after its MLP; without an MLP, all
    arguments: dict[str, Any] = field(default_factory=dict)  # apart from the hidden states


@dataclass(frozen=True)
class MetaRun:
    """Facts that one forward pass on the meta device shows."""

    layers: list[LayerRun]
    layers_share_inputs: bool  # all layers get the same arguments, apart from the hidden states
    layers_share_keys: bool  # some layer attends to keys and values of another
    passes_documents: bool  # packed documents reach attention


def run_on_meta(model: PreTrainedModel, layers: nn.ModuleList) -> MetaRun:
    """Runs a model on the meta device once without its head, in bfloat16.

    torch's grouped products take no other dtype there. Composites may have a forward of their own that nobody calls.
    Raises ValueError for attention that no kernel computes, or outside the layers.
    """
    model.to(torch.bfloat16)
    observer = _Observer(type(model).__name__, layers)
    with _tokens_unmixed(model, observer.attend), _count_saved_after_mlps(layers) as saved, observer.products:
        _run(headless(model), TOKENS, documents=observer.documents)
    return observer.finish(saved)


class _Observer:
    """Hooks of one forward pass on the meta device, and their records."""

    def __init__(self, model_name: str, layers: nn.ModuleList) -> None:
        self.documents = object()  # passed to the model in place of packed documents
        self.products = _Products(model_name)
        self._model_name = model_name
        self._layers = [LayerRun() for _ in layers]
        self._running: list[LayerRun] = []  # the layer that runs now, if any
        self._passed: list[bool] = []  # for each mixer that ran, whether it got the documents
        self._keys: list[tuple[nn.Module, Tensor]] = []  # by attention module
        self._shares_keys = False
        self._hooks: list[Any] = []
        for module, kind in mixer_modules(layers):
            self._hooks.append(module.register_forward_hook(partial(self._note_mixer, kind.facts(module))))
            self._hooks.append(module.register_forward_pre_hook(self._take_documents, with_kwargs=True))
        for layer, layer_run in zip(layers, self._layers, strict=True):
            self._hooks.append(layer.register_forward_pre_hook(partial(self._enter, layer_run), with_kwargs=True))
            self._hooks += [linear.register_forward_hook(self._note_linear) for linear in linears_of(layer)]
            self._hooks += [x.register_forward_pre_hook(self._note_experts) for _, x in experts_modules(layer)]
            self._hooks.append(layer.register_forward_hook(self._leave))

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any = None, **others: Any
    ) -> Any:
        """Notes a call of attention, in place of its result."""
        name = self._model_name
        if dropped := unhonoured_argument({"attention_mask": attention_mask} | others):
            raise ValueError(f"{name} passes {dropped} to attention, which no kernel supports; use another model")
        if not self._running:
            raise ValueError(f"{name} attends outside its layers, which no schedule supports; use another model")
        self._shares_keys |= any(k is other and module is not owner for owner, other in self._keys)
        self._keys.append((module, k))
        self._passed.append(others.get("documents") is self.documents)
        heads = Heads(q.shape[1], k.shape[1], q.shape[-1], v.shape[-1])
        self._running[-1].mixers.append(Attention(heads, sliding(others.get("sliding_window"))))
        return _shaped_as_output(q, v), None

    def finish(self, saved: list[int]) -> MetaRun:
        """Removes the hooks and returns the facts. `saved` are each layer's tensors saved after its MLP."""
        for hook in self._hooks:
            hook.remove()
        ran, name = self._layers, self._model_name
        if len(saved) != len(ran):
            raise ValueError(f"{name} has {len(ran)} layers and calls {len(saved)}; use a model that calls each once")
        for layer_run, count in zip(ran, saved, strict=True):
            layer_run.saved_after_mlp = count
        return MetaRun(
            layers=ran,
            layers_share_inputs=all(_are_same(layer_run.arguments, ran[0].arguments) for layer_run in ran),
            layers_share_keys=self._shares_keys,
            passes_documents=all(self._passed),
        )

    # ---- hooks -------------------------------------------------------------------------------------------------------

    def _enter(self, layer_run: LayerRun, _layer: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self._running.append(layer_run)
        self.products.take()
        given = {str(i): value for i, value in enumerate(args) if i > 0} | keywords
        layer_run.arguments = {key: value for key, value in given.items() if key not in NOT_COMPARED}

    def _leave(self, *_: Any) -> None:
        self._running.pop().products = self.products.take()

    def _note_linear(self, linear: Any, *_: Any) -> None:
        self._running[-1].linears.append(linear)

    def _note_mixer(self, facts: LinearMixer, *_: Any) -> None:
        self._running[-1].mixers.append(facts)

    def _note_experts(self, experts: nn.Module, args: tuple[Any, ...]) -> None:
        self._running[-1].experts = _experts(experts, per_token=args[1].shape[-1])

    def _take_documents(self, _module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        self._passed.append(keywords.pop("documents", None) is self.documents)
        return args, keywords


@contextmanager
def _tokens_unmixed(model: PreTrainedModel, attention: Callable[..., Any]) -> Iterator[None]:
    """Replaces a model's attention by a function, and its other mixers by those of training.

    Operators of mixers do nothing on the meta device and count no products.
    """
    changes = Changes()
    ALL_ATTENTION_FUNCTIONS.register(PROBE, attention)
    try:
        attend_with(attending_part(model), PROBE, changes)
        fit([model], Choices(), Ranks(one_rank_context()), changes)
        yield
    finally:
        changes.undo()


def _experts(module: Any, per_token: int) -> Experts:
    """Returns the facts about a module of stacked experts."""
    first, count = module.gate_up_proj if module.has_gate else module.up_proj, module.num_experts
    return Experts(
        count=count,
        per_token=per_token,
        first_product=first.numel() // count,
        last_product=module.down_proj.numel() // count,
    )


class _Products(TorchDispatchMode):
    """Counter of the multiplications of matrix products, grouped products of experts included."""

    def __init__(self, model_name: str) -> None:
        super().__init__()
        self._model_name, self._count = model_name, 0

    def take(self) -> int:
        """Returns the multiplications since the last call."""
        count, self._count = self._count, 0
        return count

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = op(*args, **(kwargs or {}))
        if any(part in op._opname for part in RANDOM):
            raise ValueError(
                f"{self._model_name} draws random numbers in its layers, and a recomputation would draw others; set "
                "noise such as router_jitter_noise to 0 in its config, or use your own loop around hf.enable"
            )
        # mm, addmm, bmm, baddbmm, _grouped_mm: (..., rows, inner) x (..., inner, columns)
        if "mm" in op._opname or op is PRODUCT_OP:
            left = args[1 if "add" in op._opname else 0]
            self._count += result.numel() * left.shape[-1]
        return result


def _run(model: nn.Module, tokens: int, **keywords: Any) -> None:
    for rope in model.modules():
        kinds: Any = getattr(rope, "rope_type", None)
        if hasattr(rope, "inv_freq") or isinstance(kinds, dict):  # other types read positions' values
            rope.rope_type = dict.fromkeys(kinds, "default") if isinstance(kinds, dict) else "default"  # type: ignore[assignment]
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    vocabulary = text_config(model.config).vocab_size  # type: ignore[arg-type]

    def check_table(table: nn.Module, args: tuple[Any, ...]) -> None:
        if args and args[0] is ids and table.num_embeddings < vocabulary:  # type: ignore[operator]
            raise ValueError(
                f"{type(model).__name__} looks up ids below {vocabulary} in a table of {table.num_embeddings}; correct "
                "its config"
            )

    hooks = [x.register_forward_pre_hook(check_table) for x in model.modules() if isinstance(x, nn.Embedding)]
    try:
        model(input_ids=ids, position_ids=torch.zeros_like(ids), use_cache=False, **keywords)
    finally:
        for hook in hooks:
            hook.remove()


def layer_inputs(
    model: PreTrainedModel, layers: nn.ModuleList, tokens: int
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Returns the arguments with which a model on the meta device calls its first `layers`, on that many tokens."""
    found: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def note(_layer: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        found.append((args, keywords))
        if len(found) == len(layers):
            raise _AllFound

    def pass_on(_module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Any:
        return _shaped_as_output(q, v), None

    hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    with _tokens_unmixed(model, pass_on), torch.no_grad(), suppress(_AllFound):
        _run(headless(model), tokens)
    for hook in hooks:
        hook.remove()
    return found


class _AllFound(Exception):
    """Exception that ends a forward pass once the needed layers have run."""


def _shaped_as_output(q: Tensor, v: Tensor) -> Tensor:
    """Returns a tensor of the shape of attention's result, (B, S, H, D of the values), that depends on q."""
    same = q.shape[-1] == v.shape[-1]
    return (q if same else q[..., :1].expand(*q.shape[:-1], v.shape[-1])).transpose(1, 2).contiguous()


def _are_same(x: Mapping[str, Any], y: Mapping[str, Any]) -> bool:
    return x.keys() == y.keys() and all(x[key] is y[key] for key in x)


@contextmanager
def _count_saved_after_mlps(layers: nn.ModuleList) -> Iterator[list[int]]:
    """Yields a list that receives, per layer, the number of tensors saved for backward after its MLP.

    A layer without an MLP counts all that it saves.
    """
    since: list[Tensor] = []
    counts: list[int] = []

    def save(x: Tensor) -> Tensor:
        since.append(x)
        return x

    mlps = [mlp for layer in layers if (mlp := getattr(layer, "mlp", None)) is not None]
    hooks = [mlp.register_forward_hook(lambda *_: since.clear()) for mlp in mlps]
    hooks += [layer.register_forward_hook(lambda *_: counts.append(len(since))) for layer in layers]
    with saved_tensors_hooks(save, lambda x: x):
        yield counts
    for hook in hooks:
        hook.remove()


def linears_of(module: nn.Module) -> list[nn.Linear]:
    """Returns all linears inside a module."""
    return [m for m in module.modules() if isinstance(m, nn.Linear)]
