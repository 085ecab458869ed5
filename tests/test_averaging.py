"""DDP and FSDP2 average gradients; around an enabled model they give the gradient of the whole sequence."""

import tempfile
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from trainer_numbers import common, fresh_model
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from worlds import spawn

from lightseq import hf

LENGTH = 40


def ids(seed: int = 0) -> Tensor:
    return torch.randint(3, 64, (2, LENGTH), generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module) -> list[Tensor]:
    found = [p.grad for p in model.parameters()]
    return [g.full_tensor() if isinstance(g, DTensor) else g for g in found]


def check(found: nn.Module | list[Tensor], wanted: LlamaForCausalLM, case: str) -> None:
    found = gradients(found) if isinstance(found, nn.Module) else found
    for got, parameter in zip(found, wanted.parameters(), strict=True):
        assert (got - parameter.grad).norm() <= 1e-5 * parameter.grad.norm(), (case, got.norm() / parameter.grad.norm())


def plain(*batches: Tensor) -> LlamaForCausalLM:
    model = fresh_model()
    for batch in batches:
        model(input_ids=batch, labels=batch).loss.backward()
    return model


def in_ddp(model: LlamaForCausalLM, **options: Any) -> nn.Module:
    return DistributedDataParallel(model, **options)


def with_hook(model: LlamaForCausalLM) -> nn.Module:
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, allreduce_hook)
    return wrapped


def sharded(model: LlamaForCausalLM) -> nn.Module:
    for module in (*model.model.layers, model):
        fully_shard(module)
    return model


def sharded_with_sums(model: LlamaForCausalLM) -> nn.Module:
    for module in sharded(model).modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


WRAPPERS: dict[str, Callable[[LlamaForCausalLM], nn.Module]] = {
    "DDP": in_ddp,
    "DDP that looks for unused parameters": lambda model: in_ddp(model, find_unused_parameters=True),
    "DDP with torch's hook": with_hook,
    "FSDP2": sharded,
    "FSDP2 that sums": sharded_with_sums,
}


def equals_one_process(rank: int, enabled_first: bool) -> None:
    warnings.simplefilter("ignore")
    wanted, other = plain(ids()), plain(ids(), ids(1))
    for case, wrap in WRAPPERS.items():
        model = fresh_model()
        if enabled_first:
            context, wrapped = hf.enable(model), wrap(model)
        else:
            wrapped = wrap(model)
            context = hf.enable(model)
        wrapped(**hf.shard_batch(context, ids(), ids())).loss.backward()
        check(model, wanted, case)
        model.zero_grad()
        for seed in (0, 1):  # accumulated
            quiet = wrapped.no_sync() if seed == 0 and hasattr(wrapped, "no_sync") else nullcontext()
            with quiet:
                wrapped(**hf.shard_batch(context, ids(seed), ids(seed))).loss.backward()
        check(model, other, f"{case}, accumulated")


@pytest.mark.slow
@pytest.mark.parametrize("enabled_first", [True, False])
def test_a_wrapped_model_has_the_gradients_of_one_process(enabled_first: bool) -> None:
    spawn(2, equals_one_process, enabled_first)


def log_probabilities(rank: int) -> None:
    warnings.simplefilter("ignore")
    model, wanted = fresh_model(), fresh_model()
    log_p = wanted(input_ids=ids()).logits[:, :-1].log_softmax(-1).gather(-1, ids()[:, 1:, None])
    log_p.sum().square().backward()
    context, wrapped = hf.enable(model), DistributedDataParallel(model)
    batch = hf.shard_batch(context, ids(), ids())
    values = hf.token_log_probs(context, wrapped, batch)
    hf.sequence_sums(context, values, batch).sum().square().backward()
    check(model, wanted, "log-probabilities")
    with pytest.raises(ValueError, match=r"gradient_factor=2 would scale gradients twice"):
        hf.sum_over_ranks(context, values, gradient_factor=2)


def test_losses_of_log_probabilities_are_scaled_once() -> None:
    spawn(2, log_probabilities)


def several_sequences(rank: int) -> None:
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    rows, wanted = ids()[rank // 2 :][:1], plain(ids())  # both rows have as many targets
    for all_targets in (False, True):
        model = fresh_model()
        context, wrapped = hf.enable(model, mesh["sequence"]), DistributedDataParallel(model)
        batch = hf.shard_batch(context, rows, rows)
        if all_targets:
            batch["num_items_in_batch"] = torch.tensor(2 * (LENGTH - 1))
        wrapped(**batch).loss.backward()
        check(model, wanted, f"all targets: {all_targets}")
    model = fresh_model()
    context = hf.enable(model, mesh["sequence"])
    wrapped = DistributedDataParallel(model, process_group=mesh["sequence"].get_group())
    wrapped(**hf.shard_batch(context, rows, rows)).loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=mesh["data"].get_group())
        parameter.grad /= 2
    check(model, wanted, "DDP over a sequence")
    wrapped = DistributedDataParallel(model, process_group=mesh["data"].get_group())
    with pytest.raises(ValueError, match=r"DDP averages gradients over ranks .* without rank \d, which shares their"):
        wrapped(**hf.shard_batch(context, rows, rows))


def test_ddp_over_several_sequences_averages_their_losses_or_sums_shares_of_one() -> None:
    spawn(4, several_sequences)


def sequences_without_targets(rank: int) -> None:
    """The second sequence has no target in the first batch, in which the first one's targets are all there are."""
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "sequence"))
    rows = ids()[rank:][:1]
    for wrap in (in_ddp, sharded):
        model = fresh_model()
        context, wrapped = hf.enable(model, mesh["sequence"]), wrap(model)
        for targets in ([0, 0], [LENGTH - 1, 0], [LENGTH - 1, LENGTH - 1]):
            labels = rows if targets[rank] else torch.full_like(rows, -100)
            wanted, whole = fresh_model(), ids().clone()
            whole[[i for i, count in enumerate(targets) if not count]] = -100
            wanted(input_ids=ids(), labels=whole, num_items_in_batch=max(sum(targets), 1)).loss.backward()
            wrapped.zero_grad()
            batch = hf.shard_batch(context, rows, labels)
            batch["num_items_in_batch"] = torch.tensor(max(sum(targets), 1))
            wrapped(**batch).loss.backward()
            if sum(targets):
                check(model, wanted, f"{wrap.__name__}, targets: {targets}")
        hf.disable(model)


def test_a_sequence_without_targets_does_not_change_the_scale_of_others() -> None:
    spawn(2, sequences_without_targets)


def summing_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def test_wrappers_that_may_sum_are_refused(alone: None) -> None:
    model = fresh_model()
    context = hf.enable(model)
    wrapped = DistributedDataParallel(model)
    wrapped(**hf.shard_batch(context, ids(), ids())).loss.backward()
    wrapped.register_comm_hook(None, summing_hook)  # after the first step
    with pytest.raises(ValueError, match="communication hook summing_hook, which may average or sum"):
        wrapped(**hf.shard_batch(context, ids(), ids()))
    whole = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    with pytest.raises(ValueError, match="FSDP1 averages gradients"):
        whole(**hf.shard_batch(context, ids(), ids()))


class WithTemperature(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.temperature = model, nn.Parameter(torch.ones(()))

    def forward(self, **batch: Any) -> Any:
        return self.model(**batch)


def test_gradients_that_ddp_averages_beside_or_inside_the_model_are_refused(alone: None) -> None:
    model = fresh_model()
    context = hf.enable(model)
    batch = hf.shard_batch(context, ids(), ids())
    around = DistributedDataParallel(WithTemperature(model))
    with pytest.raises(ValueError, match=r"averages the gradient of temperature, which is outside of the LlamaForCaus"):
        around(**batch)
    model.model.layers[1] = DistributedDataParallel(model.model.layers[1])
    with pytest.raises(ValueError, match=r"DDP around the part model\.layers\.1 averages gradients"):
        model(**batch)
    other = fresh_model()
    context = hf.enable(other)
    replicate(other)
    with pytest.raises(ValueError, match="replicate around the model averages gradients"):
        other(**hf.shard_batch(context, ids(), ids()))


def test_a_factor_that_divides_gradients_is_named(alone: None) -> None:
    model = sharded(fresh_model())
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(2.0)
    context = hf.enable(model)
    with pytest.warns(UserWarning, match="FSDP2 divides gradients by 2, which set_gradient_divide_factor asked for"):
        model(**hf.shard_batch(context, ids(), ids()))


class OwnLoss(Trainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        return model(**inputs | {"num_items_in_batch": torch.tensor(2 * (LENGTH - 1))}).loss


def in_a_plain_trainer(rank: int) -> None:
    warnings.simplefilter("ignore")
    wanted = plain(ids())
    for kind in (Trainer, OwnLoss):
        model, found = fresh_model(), list[list[Tensor]]()

        class Look(TrainerCallback):
            def on_pre_optimizer_step(self, *_: Any, found: list[list[Tensor]] = found, **kwargs: Any) -> None:
                found.append([p.grad.clone() for p in kwargs["model"].parameters()])

        context = hf.enable(model)
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                **common(folder, eval_strategy="no", max_steps=1, remove_unused_columns=False)
            )
            rows = [{"input_ids": x} for x in ids() for _ in range(2)]  # Trainer deals them out to the ranks
            arguments.train_sampling_strategy = "sequential"

            def collate(_rows: list[Any], context: Any = context) -> dict[str, Any]:
                return hf.shard_batch(context, ids(), ids())

            kind(model, arguments, data_collator=collate, train_dataset=rows, callbacks=[Look()]).train()
        check(found[0], wanted, kind.__name__)


def test_a_plain_trainer_that_scales_the_loss_is_not_scaled_twice() -> None:
    spawn(2, in_a_plain_trainer)
