"""Checks of the inputs and outputs of a patched model, where a mistake would train on nonsense without an error."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightseq.attention.context import Documents, ForwardPass, SequenceContext
from lightseq.comm.transport import base_transport_name
from lightseq.data.examples import IGNORE_INDEX
from lightseq.data.shard_batch import packed_positions

BATCHES_BETWEEN_COMPARISONS: Final = 100
BATCH_FACTS: Final = "batch_facts"  # key of `batch_facts` in a batch


def batch_facts(input_ids: Tensor, shifted_labels: Tensor | None) -> Tensor:
    """Returns what ranks that share a batch must agree on: its shape, number of targets and a checksum, int64 (4,).

    The result stays on the device of the ids, so nothing waits for it.
    """
    # Overflow is fine in a checksum; odd factors distinguish orders.
    factors = torch.arange(1, 2 * input_ids.numel(), 2, device=input_ids.device) * 0x9E3779B1
    checksum = (input_ids.flatten() * factors).sum()
    targets = checksum.new_zeros(())
    if shifted_labels is not None:
        targets = (shifted_labels != IGNORE_INDEX).sum()
        checksum = checksum * 31 + (shifted_labels.flatten() * factors).sum()
    batch, length = input_ids.shape
    return torch.stack([torch.full_like(checksum, batch), torch.full_like(checksum, length), targets, checksum])


def install_checks(model: PreTrainedModel, length_dependent_rope: bool) -> None:
    """Installs hooks that check every forward pass of a model, also of its base model without the head.

    Both a wrapper such as PEFT's and the model inside it are checked, because either may be called. The modules find
    their context in `sequence_context`. Calling it again after that was replaced installs nothing twice.
    """
    inner = transformers_model(model)
    base, layers = inner.base_model, inner.config.num_hidden_layers
    for module in {model, inner, base}:
        installed = "checked_shapes" in vars(module)  # not inherited: wrappers forward attributes of the module inside
        module.checked_shapes = set()  # type: ignore[assignment]
        module.length_dependent_rope = length_dependent_rope  # type: ignore[assignment]
        if installed:
            continue
        module.register_forward_pre_hook(_check_inputs, with_kwargs=True)
        if module is not base:
            module.register_forward_pre_hook(_check_labels, with_kwargs=True)
            # Before FSDP's hook, which casts the output to another tensor.
            module.register_forward_hook(_check_loss, prepend=True, with_kwargs=True)
        module.register_forward_hook(partial(_check_pass, layers), always_call=True)


def transformers_model(model: nn.Module) -> PreTrainedModel:
    """Returns the model of transformers itself, which a wrapper such as PEFT's may hold."""
    return next(module for module in model.modules() if isinstance(module, PreTrainedModel))


@torch.compiler.disable  # reads values and asks other ranks, which cannot be compiled
def _check_inputs(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Refuses inputs that attention over ranks cannot honour. Returns the inputs without those only checks need."""
    context, config = model.sequence_context, model.config
    assert isinstance(context, SequenceContext)
    kwargs = dict(kwargs)
    if len(args) > 1:
        raise ValueError(f"{len(args)} positional arguments; pass all but the first by keyword, as shard_batch does")
    if kwargs.get("use_cache") or kwargs.get("past_key_values") is not None:
        raise ValueError("there is no key/value cache; to generate, load the saved model into plain transformers")
    if getattr(config, "use_cache", False):
        kwargs["use_cache"] = False
    for flag, reason in (
        ("output_attentions", "attention never makes the matrix of scores"),
        ("output_router_logits", "the router's loss would be computed on each shard by itself"),
    ):
        if kwargs.get(flag) or (kwargs.get(flag) is None and getattr(config, flag, False)):
            raise ValueError(f"{flag}=True is not supported: {reason}; set it to False")
    mask = kwargs.get("attention_mask")
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.ndim != 2 or not bool((mask == 1).all()):
            raise ValueError("a shard takes no attention_mask; pass the whole mask to shard_batch, which leaves it out")
        kwargs["attention_mask"] = None
    documents = kwargs.get("documents")
    facts = kwargs.pop(BATCH_FACTS, None)
    if facts is not None and facts.shape == (4,):  # a batch that was cut into smaller ones has other shapes
        _compare_batches(context, facts, kwargs.get("labels"), kwargs.get("num_items_in_batch"))
        if documents is not None:
            _begin_comparing_documents(context, documents)
            if (
                base_transport_name(context.transport.name) == "gloo"
            ):  # attention will wait for the other ranks on the host
                _finish_comparing_documents(context.forward_pass)
    _check_positions_and_documents(model, context, kwargs.get("position_ids"), documents)
    state = context.forward_pass
    if state.outermost is None:  # the head may not forward documents to the layers
        state.outermost, state.packed = model, documents is not None
    if model is transformers_model(model).base_model:
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
                "the model's RoPE scales with the length of a sequence, and packed documents differ in theirs"
            )
        if not documents.match(context):
            raise ValueError("the packed batch was made for another context; call shard_batch with this model's")
        if positions is None:
            raise ValueError("position_ids are missing: they restart with every document; use shard_batch")
    elif positions is None:
        if context.layout.world > 1:
            raise ValueError("position_ids are missing, so this batch is not from shard_batch; pass what that returns")
        return
    shape = (documents is None, *positions.shape)
    if positions.is_cpu or shape not in checked:  # reading a GPU tensor synchronizes
        if documents is None:
            check_positions(context, positions)
        elif not torch.equal(positions.cpu(), packed_positions(context, documents)):
            raise ValueError(f"position_ids are not those of the documents on rank {context.rank}; use shard_batch")
        checked.add(shape)


def check_positions(context: SequenceContext, positions: Tensor) -> None:
    """Raises ValueError unless positions are those of this rank's tokens in one sequence."""
    layout, local = context.layout, positions.shape[-1]
    if local % layout.chunks_per_rank:
        raise ValueError(f"{local} local tokens are not {layout.chunks_per_rank} chunks a rank; use shard_batch")
    want, got = layout.positions(context.rank, local * layout.world), positions.cpu()
    padded = want.clamp_max(int(got.max()))  # padding has the position of the last token
    if not torch.equal(got, padded.expand_as(got)):
        raise ValueError(
            f"position_ids are not those of the {layout.kind} layout on rank {context.rank}; use shard_batch, with "
            "cu_seqlens where they restart"
        )


def _forward_pass(model: nn.Module) -> ForwardPass:
    context = model.sequence_context
    assert isinstance(context, SequenceContext)
    return context.forward_pass


@torch.compiler.disable
def _check_pass(layers: int, model: nn.Module, _args: tuple, output: Any) -> None:
    """Refuses a pass in which a layer's attention did not run over all ranks.

    Also runs after an exception, without an output.
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
            f"attention ran over all ranks {ran} times in {layers} layers, so that some attended to a shard alone: "
            "leave set_attn_implementation alone after hf.enable, and use a model whose layers all take their "
            "attention from transformers' interface"
        )


# ---- what ranks share ----------------------------------------------------------------------------------------------


def _compare_batches(
    context: SequenceContext, facts: Tensor, labels: Tensor | None, num_items: Tensor | float | None
) -> None:
    """Raises ValueError on every rank if ranks that share a sequence were given different batches or divisors.

    Compares the first batch and every hundredth after it, because comparing waits for the other ranks.
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
            f"ranks {context.rank} and {other} share a sequence and were given different batches ({what}); have "
            "every rank of a sequence read the same rows: with Trainer through a plain DataLoader, shuffled by one "
            "seed (examples/with_trainer.py)"
        )
    divisors = [divisor for _, divisor, _ in everyone]
    counted_alone = len(divisors) > 1 and divisors == [count for *_, count in everyone] != [None] * len(divisors)
    if len(set(divisors)) > 1 or counted_alone:
        found = ", ".join(f"{divisor:g}" if divisor is not None else "missing" for divisor in divisors)
        raise ValueError(
            f"num_items_in_batch is {found} on the ranks, and their batch has {targets} targets in all; every rank "
            "divides by the same number: leave Trainer's average_tokens_across_devices on, or pass on what shard_batch "
            "gives"
        )


def _begin_comparing_documents(context: SequenceContext, documents: Documents) -> None:
    """Starts exchanging a hash of the documents, on the host and for every batch.

    Ranks with different documents would wait for each other forever. If the group has no backend for the host,
    attention compares once for each shape.
    """
    if "cpu" not in dist.get_backend_config(context.group):
        return
    mine = torch.tensor([hash(documents.padded_boundaries)])
    everyone = [torch.empty_like(mine) for _ in range(context.layout.world)]
    work = dist.all_gather(everyone, mine, group=context.group, async_op=True)
    context.forward_pass.comparison = (work, everyone)


def _finish_comparing_documents(state: ForwardPass) -> None:
    """Raises ValueError on every rank if they were given different documents."""
    if state.comparison is None:
        return
    (work, everyone), state.comparison = state.comparison, None
    work.wait()
    if len({int(theirs) for theirs in everyone}) > 1:
        raise ValueError("the ranks were given different documents; pack the same sequence on all of them")


# ---- labels and loss -----------------------------------------------------------------------------------------------


@torch.compiler.disable
def _check_labels(model: nn.Module, _args: tuple, kwargs: dict[str, Any]) -> None:
    if _forward_pass(model).outermost is not model:  # the wrapper around it was checked
        return
    labels, shifted = kwargs.get("labels"), kwargs.get("shift_labels")
    if labels is not None and shifted is None:
        raise ValueError("labels would be shifted inside the shard, losing a target at its border; use shard_batch")
    if labels is None and shifted is not None:
        raise ValueError(
            "shift_labels came without labels: Trainer's label_smoothing_factor and compute_loss_func are not "
            "supported, for they shift labels again that shard_batch has shifted; leave them out. For a loss of your "
            "own that does not shift, take shift_labels out of the batch before the model is called"
        )
    _forward_pass(model).loss = None
    inner = transformers_model(model)
    if getattr(inner.loss_function, "func", None) is not _sharded_loss:  # it may have been replaced since
        inner.loss_function = partial(_sharded_loss, inner, inner.loss_function)


def _sharded_loss(model: nn.Module, loss_function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Calls the model's loss function with shifted labels and the whole batch's divisor."""
    for name in ("shift_labels", "num_items_in_batch"):
        if kwargs.get(name) is None:
            raise ValueError(
                f"the loss of a shard needs {name}, which {type(model).__name__} was not given or does not hand on to "
                "its loss; pass all that shard_batch gives, or use another model"
            )
    loss = loss_function(*args, **kwargs)
    _record_loss(model, loss)
    return loss


@torch.compiler.disable
def _record_loss(model: nn.Module, loss: Tensor) -> None:
    _forward_pass(model).loss = (loss, _version(loss))


def _version(x: Tensor) -> int:
    """Returns how often the tensor was changed in place; inference mode does not count that."""
    return 0 if x.is_inference() else x._version


@torch.compiler.disable
def _check_loss(model: nn.Module, _args: tuple, kwargs: dict[str, Any], output: Any) -> None:
    """Refuses a loss other than the loss function's result, for example one with a router's term of the shard."""
    state = _forward_pass(model)
    if state.outermost is not model:
        return
    noted, state.loss = state.loss, None
    if kwargs.get("labels") is None:
        return
    returned = output[0] if isinstance(output, tuple) else output.loss
    if noted is None and _has_fused_loss(model):
        return  # it takes shift_labels and num_items_in_batch itself
    if noted is None or returned is not noted[0] or _version(returned) != noted[1]:
        raise ValueError(
            f"{type(model).__name__} returns a loss that its loss function did not give, with a term of each shard by "
            "itself perhaps (a router's); turn that term off, or use another model"
        )


def _has_fused_loss(model: nn.Module) -> bool:
    """Returns whether Liger replaced the forward pass by one that computes the loss without the logits."""
    forward: Any = transformers_model(model).forward
    while hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    return str(forward.__module__).startswith("liger_kernel")
