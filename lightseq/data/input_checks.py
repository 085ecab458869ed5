"""Checks of a patched model's inputs and outputs for mistakes that would silently train on wrong data."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from lightseq.attention.context import SequenceContext
from lightseq.attention.forward_pass import ForwardPass
from lightseq.comm.transport import base_transport_name
from lightseq.distributed.averaging import find_averaging, trainer_scales_loss
from lightseq.models.architecture import transformers_model, windows_of_masks
from lightseq.modules.replaced_head import tensor_version
from lightseq.sequence.documents import Documents
from lightseq.utils.labels import IGNORE_INDEX

BATCHES_BETWEEN_COMPARISONS: Final = 100
BATCH_FACTS: Final = "batch_facts"  # key of `batch_facts` in a batch


def batch_facts(input_ids: Tensor, shifted_labels: Tensor | None) -> Tensor:
    """Returns the values that ranks sharing a batch must agree on, int64 (4,): its shape, targets and a checksum.

    The result stays on the ids' device, so nothing synchronizes.
    """
    # A checksum may overflow. The odd factors make it depend on the order of the ids.
    factors = torch.arange(1, 2 * input_ids.numel(), 2, device=input_ids.device) * 0x9E3779B1
    checksum = (input_ids.flatten() * factors).sum()
    targets = checksum.new_zeros(())
    if shifted_labels is not None:
        targets = (shifted_labels != IGNORE_INDEX).sum()
        checksum = checksum * 31 + (shifted_labels.flatten() * factors).sum()
    batch, length = input_ids.shape
    return torch.stack([torch.full_like(checksum, batch), torch.full_like(checksum, length), targets, checksum])


def install_checks(model: PreTrainedModel, length_dependent_rope: bool) -> None:
    """Installs hooks that check every forward pass of a model and of its base model without the head.

    Both a wrapper such as PEFT's and the model inside it are checked, because either may be called. The hooks read the
    module's `sequence_context`. A second call, for a new context, installs no second hook.
    """
    inner = transformers_model(model)
    base, layers = inner.base_model, inner.config.num_hidden_layers
    for module in {model, inner, base}:
        installed = "checked_shapes" in vars(module)  # `hasattr` would find a wrapped module's attribute
        module.checked_shapes = set()  # type: ignore[assignment]
        module.length_dependent_rope = length_dependent_rope  # type: ignore[assignment]
        if installed:
            continue
        hooks = [module.register_forward_pre_hook(_check_inputs, with_kwargs=True)]
        if module is not base:
            hooks.append(module.register_forward_pre_hook(_check_labels, with_kwargs=True))
            # FSDP's hook casts the loss to another tensor, so this one runs first.
            hooks.append(module.register_forward_hook(_check_loss, prepend=True, with_kwargs=True))
        hooks.append(module.register_forward_hook(_scale_gradients))
        hooks.append(module.register_forward_hook(partial(_check_pass, layers), always_call=True))
        module.check_hooks = hooks  # type: ignore[assignment]


def remove_checks(model: nn.Module) -> None:
    """Removes the hooks of `install_checks` from a model and all modules inside it, and restores its loss function."""
    for module in model.modules():
        for hook in vars(module).pop("check_hooks", ()):
            hook.remove()
        for name in ("checked_shapes", "length_dependent_rope", "mask_windows"):
            vars(module).pop(name, None)
    inner = transformers_model(model)
    before = loss_function_of(inner)
    if inner.loss_function is not before:
        del inner._loss_function
        if inner.loss_function is not before:  # not the default of the model's class
            inner.loss_function = before


def loss_function_of(model: PreTrainedModel) -> Callable[..., Tensor]:
    """Returns the model's own loss function, without the checks around it."""
    function: Any = model.loss_function
    checked = getattr(function, "func", None) is _sharded_loss
    own: Callable[..., Tensor] = function.args[-1] if checked else function
    return own


@torch.compiler.disable  # reads tensor values and communicates, which cannot be compiled
def _check_inputs(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Raises ValueError for inputs that attention over ranks does not support. Returns the inputs for the model."""
    context, config = model.sequence_context, model.config
    assert isinstance(context, SequenceContext)
    kwargs = dict(kwargs)
    if len(args) > 1:
        raise ValueError(f"{len(args)} positional arguments; pass all but the first by keyword, as shard_batch does")
    if kwargs.get("use_cache") or kwargs.get("past_key_values") is not None:
        raise ValueError(
            "a key/value cache is not supported; to generate, call hf.disable(model), or load the saved model in plain "
            "transformers"
        )
    if getattr(config, "use_cache", False):
        kwargs["use_cache"] = False
    for flag, reason in (
        ("output_attentions", "attention never materializes the score matrix"),
        ("output_router_logits", "the router's loss would see only one shard"),
    ):
        if kwargs.get(flag) or (kwargs.get(flag) is None and getattr(config, flag, False)):
            raise ValueError(f"{flag}=True is not supported: {reason}; set it to False")
    if (ignored := kwargs.get("ignore_index")) not in (None, IGNORE_INDEX):
        raise ValueError(f"ignore_index={ignored} is not supported; set labels without a target to {IGNORE_INDEX}")
    mask = kwargs.get("attention_mask")
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.ndim != 2 or not bool((mask == 1).all()):
            raise ValueError("attention_mask masks tokens of a shard; pass the whole mask to shard_batch instead")
        kwargs["attention_mask"] = None
    documents = kwargs.get("documents")
    facts = kwargs.pop(BATCH_FACTS, None)
    _check_positions_and_documents(model, context, kwargs.get("position_ids"), documents)
    if facts is not None:
        local = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        announce_pass(context, (local.shape[0], local.shape[1] * context.layout.world), model.training)
        context.forward_pass.announced = False
        _find_gradient_factor(model, context, facts, kwargs.get("num_items_in_batch"))
    if facts is not None and facts.shape == (4,):  # wrappers that split a batch change the shape
        _compare_batches(context, facts, kwargs.get("labels"), kwargs.get("num_items_in_batch"))
        if documents is not None:
            _begin_comparing_documents(context, documents)
            # With gloo, attention waits for the other ranks on the host, so different documents would hang there.
            if base_transport_name(context.transport.name) == "gloo":
                _finish_comparing_documents(context.forward_pass)
    state = context.forward_pass
    if state.outermost is None:  # the model around the layers may not forward `documents` to them
        state.outermost, state.packed = model, documents is not None
    if model is (inner := transformers_model(model)).base_model:
        if windows_of_masks(inner) != model.mask_windows:
            raise ValueError("the windows in the model's config changed after hf.enable; call hf.enable again")
        state.attention_passes = context.progress.passes
    return args, kwargs


def _check_positions_and_documents(
    model: nn.Module, context: SequenceContext, positions: Tensor | None, documents: Documents | None
) -> None:
    checked = model.checked_shapes
    assert isinstance(checked, set)
    if documents is not None:
        if model.length_dependent_rope:
            raise ValueError(
                "the model's RoPE depends on the sequence length, and packed documents have different lengths; turn "
                "packing off, or use another rope_type"
            )
        if not context.sequence.match(documents):
            raise ValueError("the packed batch belongs to another context; call shard_batch with this model's context")
        if positions is None:
            raise ValueError("position_ids are missing for packed documents; pass those that shard_batch returns")
    elif positions is None:
        if context.layout.world > 1:
            raise ValueError("position_ids are missing; make the batch with shard_batch and pass all that it returns")
        return
    shape = (documents is None, *positions.shape)
    if positions.is_cpu or shape not in checked:  # reading a GPU tensor synchronizes
        if documents is None:
            check_positions(context, positions)
        elif not torch.equal(positions.cpu(), documents.positions(context.rank)):
            raise ValueError(f"position_ids do not match the documents on rank {context.rank}; use shard_batch")
        checked.add(shape)


def check_positions(context: SequenceContext, positions: Tensor) -> None:
    """Raises ValueError unless `positions` are the global positions of this rank's tokens."""
    layout, local = context.layout, positions.shape[-1]
    if local % layout.chunks_per_rank:
        raise ValueError(f"{local} local tokens do not split into {layout.chunks_per_rank} chunks; use shard_batch")
    want, got = layout.positions(context.rank, local * layout.world), positions.cpu()
    padded = want.clamp_max(int(got.max()))  # padding has the position of the last token
    if not torch.equal(got, padded.expand_as(got)):
        raise ValueError(
            f"position_ids do not match the {layout.kind} layout on rank {context.rank}; use shard_batch, with "
            "cu_seqlens for packed documents"
        )


def _forward_pass(model: nn.Module) -> ForwardPass:
    context = model.sequence_context
    assert isinstance(context, SequenceContext)
    return context.forward_pass


@torch.compiler.disable
def _check_pass(layers: int, model: nn.Module, _args: tuple, output: Any) -> None:
    """Raises ValueError after a forward pass in which a layer's attention did not run over all ranks.

    After an exception in the forward pass, `output` is None.
    """
    context, state = model.sequence_context, _forward_pass(model)
    assert isinstance(context, SequenceContext)
    if state.outermost is model:
        state.outermost, state.packed = None, False
        _finish_comparing_documents(state)
    if output is None or model is not transformers_model(model).base_model:
        return
    ran = context.progress.passes - state.attention_passes
    if not ran or ran % layers:  # some models call attention, or their layers, more than once
        raise ValueError(
            f"attention over all ranks ran {ran} times in {layers} layers, so some attended only within a shard; "
            "do not call set_attn_implementation after hf.enable, and use a model whose layers all use transformers' "
            "attention interface"
        )


# ---- agreement between ranks ---------------------------------------------------------------------------------------


def announce_pass(context: SequenceContext, shape: tuple[int, int], training: bool) -> None:
    """Raises ValueError if ranks that share a sequence make different calls, such as one rank that samples alone.

    A second announcement of the same pass does nothing. `shape` is that of the batch; passes that compare whole batches
    leave it to the comparison.
    """
    state = context.forward_pass
    if state.announced or state.roll_call is None:
        return
    state.announced = True
    is_step = training and torch.is_grad_enabled()
    what = "trains" if is_step else "runs the model without training it"
    compares = state.batches % BATCHES_BETWEEN_COMPARISONS == 0
    state.roll_call.make(what if compares else f"{what} on {shape[0]} x {shape[1]} tokens", is_step)


def _compare_batches(
    context: SequenceContext, facts: Tensor, labels: Tensor | None, num_items: Tensor | float | None
) -> None:
    """Raises ValueError on every rank if ranks that share a sequence got different batches or divisors.

    Compares the first batch and every hundredth after it, because a comparison waits for the other ranks.
    """
    state = context.forward_pass
    state.batches += 1
    if state.batches % BATCHES_BETWEEN_COMPARISONS != 1:
        return
    batch, length, targets, checksum = facts.tolist()
    rows = (batch, length, targets, checksum)
    divisor = None if num_items is None else float(num_items)
    own_targets = None if labels is None else float((labels != IGNORE_INDEX).sum())
    everyone: list[Any] = [None] * context.layout.world
    dist.all_gather_object(everyone, (rows, divisor, own_targets), group=context.group)
    other = next((rank for rank, (theirs, _, _) in enumerate(everyone) if theirs != rows), None)
    if other is not None:
        sizes = [f"{batch} x {length} tokens" for batch, length, *_ in (rows, everyone[other][0])]
        what = "other rows or labels" if sizes[0] == sizes[1] else " and ".join(sizes)
        raise ValueError(
            f"ranks {context.rank} and {other} share a sequence but got different batches ({what}); give every rank of "
            "a sequence the same rows; lightseq.integrations does so in Trainer, TRL and accelerate (docs/trainers.md)"
        )
    divisors = [divisor for _, divisor, _ in everyone]
    counted_alone = len(divisors) > 1 and divisors == [count for *_, count in everyone] != [None] * len(divisors)
    if len(set(divisors)) > 1 or counted_alone:
        found = ", ".join(f"{divisor:g}" if divisor is not None else "missing" for divisor in divisors)
        raise ValueError(
            f"num_items_in_batch is {found} on the ranks, but the whole batch has {targets} targets; pass the value of "
            "shard_batch, or leave Trainer's average_tokens_across_devices on"
        )


def _begin_comparing_documents(context: SequenceContext, documents: Documents) -> None:
    """Starts exchanging a hash of the documents on the host, for every batch.

    Ranks with different documents would wait for each other forever. If the group has no CPU backend, attention
    compares documents once per shape instead.
    """
    if "cpu" not in dist.get_backend_config(context.group):
        return
    mine = torch.tensor([hash(documents.padded_boundaries)])
    everyone = [torch.empty_like(mine) for _ in range(context.layout.world)]
    work = dist.all_gather(everyone, mine, group=context.group, async_op=True)
    context.forward_pass.comparison = (work, everyone)


def _finish_comparing_documents(state: ForwardPass) -> None:
    """Raises ValueError on every rank if the ranks got different documents."""
    if state.comparison is None:
        return
    (work, everyone), state.comparison = state.comparison, None
    work.wait()
    if len({int(theirs) for theirs in everyone}) > 1:
        raise ValueError("the ranks got different documents; pass the same packed sequence on every rank")


# ---- wrappers that average gradients --------------------------------------------------------------------------------


def _find_gradient_factor(
    model: nn.Module, context: SequenceContext, facts: Tensor, num_items: Tensor | float | None
) -> None:
    """Sets the factor of gradients with which a wrapper's average over ranks is the sum that a sequence needs.

    The ranks of a sequence are summed. Over several sequences DDP and FSDP2 then still average, as they do for plain
    models, unless the loss is divided by the targets of all sequences.
    """
    state = context.forward_pass
    compares = state.batches % BATCHES_BETWEEN_COMPARISONS == 0
    ddp = DistributedDataParallel._get_active_ddp_module()
    hooks = tuple(id(hook) for hook, _ in ddp._comm_hooks) if ddp is not None else ()
    wrappers = (type(model), id(ddp), hooks, num_items is None)
    if state.gradients_are_averaged_outside or not torch.is_grad_enabled():
        return
    if wrappers == state.averaging_checked and not compares:
        return
    is_new, state.averaging_checked = wrappers != state.averaging_checked, wrappers
    state.gradient_factor = 1
    averaging = find_averaging(model)
    if averaging is None or trainer_scales_loss():
        return
    ranks, wrapper = dist.get_process_group_ranks(context.group), averaging.wrapper
    if missing := sorted(set(ranks) - set(averaging.ranks)):
        raise ValueError(
            f"{wrapper} averages gradients over ranks {', '.join(map(str, averaging.ranks))} without rank "
            f"{missing[0]}, which shares their sequence; let {wrapper} span all ranks, or sum gradients without it"
        )
    factor = len(ranks)
    if len(averaging.ranks) > factor and num_items is not None and facts.shape == (4,):
        own_targets = max(int(facts[2]), 1)
        if float(num_items) != own_targets:
            factor = len(averaging.ranks)
    state.gradient_factor = factor
    if is_new and factor > 1 and dist.get_rank() == averaging.ranks[0]:
        warnings.warn(
            f"{wrapper} averages gradients over {len(averaging.ranks)} ranks, which share sequences: lightseq "
            f"multiplies them by {factor}; do not scale the loss for that yourself",
            stacklevel=2,
        )


@torch.compiler.disable
def _scale_gradients(model: nn.Module, _args: tuple, output: Any) -> Any:
    """Multiplies the gradients of the outermost module's outputs, from which parameters get theirs."""
    state = _forward_pass(model)
    if state.outermost is not model or state.gradient_factor == 1 or not torch.is_grad_enabled():
        return output
    return tree_map_only(Tensor, lambda x: _Scaled.apply(x, state.gradient_factor) if x.requires_grad else x, output)


class _Scaled(torch.autograd.Function):
    """Identity with a scaled gradient. A hook on a tensor would also scale what reaches it from other outputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: int) -> Tensor:  # type: ignore[override]
        ctx.factor = factor
        return x.detach()  # no view, of which FSDP2 warns

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient * ctx.factor, None


# ---- labels and loss -----------------------------------------------------------------------------------------------


@torch.compiler.disable
def _check_labels(model: nn.Module, _args: tuple, kwargs: dict[str, Any]) -> None:
    if _forward_pass(model).outermost is not model:  # the wrapper around the model was checked
        return
    labels, shifted = kwargs.get("labels"), kwargs.get("shift_labels")
    if labels is not None and shifted is None:
        raise ValueError("labels without shift_labels would lose targets at the shard's border; use shard_batch")
    if labels is None and shifted is not None:
        raise ValueError(
            "shift_labels without labels: Trainer's label_smoothing_factor and compute_loss_func would shift labels "
            "a second time; leave them out. For your own loss, remove shift_labels from the batch before the model call"
        )
    _forward_pass(model).loss = None
    inner = transformers_model(model)
    if getattr(inner.loss_function, "func", None) is not _sharded_loss:  # new, or replaced by the user
        inner.loss_function = partial(_sharded_loss, inner, inner.loss_function)


def _sharded_loss(model: nn.Module, loss_function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Calls the model's loss function. Raises ValueError without shifted labels or the whole batch's divisor."""
    for name in ("shift_labels", "num_items_in_batch"):
        if kwargs.get(name) is None:
            raise ValueError(
                f"the loss of a shard needs {name}, which {type(model).__name__} did not get or does not pass to its "
                "loss; pass all that shard_batch returns, or use another model"
            )
    loss = loss_function(*args, **kwargs)
    _record_loss(model, loss)
    return loss


@torch.compiler.disable
def _record_loss(model: nn.Module, loss: Tensor) -> None:
    _forward_pass(model).loss = (loss, tensor_version(loss))


@torch.compiler.disable
def _check_loss(model: nn.Module, _args: tuple, kwargs: dict[str, Any], output: Any) -> None:
    """Raises ValueError for a loss that is not the loss function's result, such as one with a router loss added."""
    state = _forward_pass(model)
    if state.outermost is not model:
        return
    noted, state.loss = state.loss, None
    if kwargs.get("labels") is None:
        return
    returned = output[0] if isinstance(output, tuple) else output.loss
    if noted is None and has_fused_loss(model):
        return  # the fused loss takes shift_labels and num_items_in_batch itself
    if noted is None or returned is not noted[0] or tensor_version(returned) != noted[1]:
        raise ValueError(
            f"{type(model).__name__} returns a loss that is not its loss function's result, such as one with a router "
            "loss added; turn that term off, or use another model"
        )


def has_fused_loss(model: nn.Module) -> bool:
    """Returns whether Liger replaced the forward pass with one that computes the loss without logits."""
    forward: Any = transformers_model(model).forward
    while hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    return str(forward.__module__).startswith("liger_kernel")
