"""Router losses and biases of `lightseq train` equal plain transformers on one process, and a written reference."""

import copy
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from programs import programs
from test_router_losses import COEFFICIENT, DOCUMENTS, LENGTH, built, ids, loss_of_documents, masked_labels, masked_tail
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from worlds import one_process, spawn

from benchmarks.command_line import NEEDED
from lightseq import hf
from lightseq.attention.context import release
from lightseq.config.command_line import parse
from lightseq.distributed.parallel_dims import parallel_dims
from lightseq.distributed.world import World
from lightseq.hf.agreement import COUNTED_TOKENS
from lightseq.memory.recomputation import MemorySettings
from lightseq.models import weights
from lightseq.parallelize import parallelize
from lightseq.parts.chosen_experts import build_to_train
from lightseq.parts.experts import experts_modules
from lightseq.parts.routers import BIAS
from lightseq.training.metrics import read_records
from lightseq.training.router_flags import make_routers

CPU = torch.device("cpu")
PASSES = 2
# Families and flags; "packed" rows hold documents, others are a batch of two with a masked tail.
CASES: Mapping[str, tuple[str, str]] = {
    "Mixtral": ("mixtral", "--remat full"),
    "Mixtral, packed": ("mixtral", "--remat attention"),
    "Qwen 3": ("qwen3_moe", "--remat none"),
    "Qwen 3, packed": ("qwen3_moe", "--remat attention+mlp"),
    "OLMoE": ("olmoe", "--remat attention"),
    "gpt-oss": ("gpt_oss", "--remat attention"),
    "Granite": ("granitemoe", "--remat full"),
    "MiniMax M2": ("minimax_m2", "--remat attention"),
}
COMPILED = {
    "Mixtral": ("mixtral", "--remat attention --torch_compile True"),
    "Qwen 3, packed": ("qwen3_moe", "--remat full --torch_compile True"),
}
BACKEND = "aot_eager_decomp_partition"  # splits graphs as inductor does, which takes minutes


def train_passes(want: PreTrainedModel, flags: str, packed: bool) -> tuple[float, dict[str, Tensor], Tensor]:
    """Runs two passes of a step. Returns their mean router loss, the gradients and the loss, summed over ranks."""
    run = parse([*NEEDED, "--model_max_length", str(LENGTH), *flags.split()], "")
    world = World(dist.get_rank(), dist.get_world_size(), dist.get_rank(), dist.get_world_size(), CPU)
    dims = parallel_dims(world)
    model = build_to_train(copy.deepcopy(want.config)).eval()
    parallel = parallelize(model, run, dims, MemorySettings())
    routers = make_routers(run, model, parallel.context)
    assert routers is not None
    state = want.state_dict()
    weights.materialize(model, CPU)
    for name, parameter in weights.base_parameters(model).items():
        weights.fill(parameter, state[name].__getitem__)
    loss = router_loss = torch.zeros(())
    for batch, labels, mask in batches(packed):
        given = hf.shard_batch(parallel.context, batch, labels, mask, cu_seqlens=DOCUMENTS if packed else None)
        routers.begin(given.get(COUNTED_TOKENS))
        args = (given["input_ids"], given["position_ids"], given["labels"], given.get("documents"))
        share = parallel.loss_model(*args) / given["num_items_in_batch"] / PASSES
        share, added = routers.add_loss(share, PASSES)
        router_loss = router_loss + added
        loss = loss + share.detach()
        (8 * share).backward()  # as scaled in float16
    routers.finish()
    gradients = {}
    for name, p in model.named_parameters():
        whole = torch.zeros_like(p) if p.grad is None else p.grad
        whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
        if name in getattr(parallel, "whole", ()):
            dist.all_reduce(whole)
        gradients[name] = whole / 8
    with torch.no_grad():  # is not observed
        parallel.loss_model(*args)
    release(parallel.context)
    sums = torch.stack([loss, router_loss])
    dist.all_reduce(sums)
    return sums[1].item(), gradients, sums[0]


def batches(packed: bool) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    if packed:
        return [(ids(), ids(), None)] * PASSES
    mask = masked_tail()
    return [(ids(2), masked_labels(ids(2), mask), mask), (ids(2, seed=1), ids(2, seed=1), None)]


def expected(want: PreTrainedModel, packed: bool) -> tuple[float, Tensor]:
    """Runs plain transformers on one process. Returns the mean router loss, and the loss with it."""
    if packed:
        loss, router_loss = loss_of_documents(want)
        return router_loss.item(), loss
    losses, router_losses = [], []
    for batch, labels, mask in batches(packed):
        output = want(input_ids=batch, labels=labels, attention_mask=mask, output_router_logits=True, use_cache=False)
        (output.loss / PASSES).backward()
        losses.append(output.loss.detach() / PASSES)
        router_losses.append(output.aux_loss.item() / PASSES)
    return sum(router_losses), torch.stack(losses).sum()


def families(rank: int, cases: Mapping[str, tuple[str, str]]) -> dict[str, str | None]:
    found = dict[str, str | None]()
    torch.compile = partial(torch.compile, backend=BACKEND)  # type: ignore[assignment]
    for name, (model_type, flags) in cases.items():
        want, packed = built(model_type, output_router_logits=True), name.endswith("packed")
        flags += " --packing best_fit" if packed else ""
        right_router_loss, right_loss = expected(want, packed)
        router_loss, gradients, loss = train_passes(want, flags, packed)
        if abs(router_loss - right_router_loss) > 1e-5 or abs(loss - right_loss) > 1e-5:
            found[name] = f"{loss} and {router_loss}, one process has {right_loss} and {right_router_loss}"
            continue
        for parameter, p in want.named_parameters():
            right = torch.zeros_like(p) if p.grad is None else p.grad
            if (gradients[parameter] - right).norm() > 1e-5 * right.norm().clamp_min(1e-2):
                found[name] = f"gradient of {parameter} is off"
    return found


def quick(*names: str) -> dict[str, tuple[str, str]]:
    return {name: CASES[name] for name in names}


@pytest.mark.parametrize(
    ("world", "cases"),
    [
        (2, quick("Mixtral")),
        *(pytest.param(world, CASES, marks=pytest.mark.slow) for world in (1, 2, 3)),
        pytest.param(2, COMPILED, marks=pytest.mark.slow),
    ],
)
def test_training_with_router_losses_equals_one_process(world: int, cases: Mapping[str, tuple[str, str]]) -> None:
    assert spawn(world, families, cases) == [{}] * world


# ---- the command -----------------------------------------------------------------------------------------------------

ROWS = [ids()[0, :n].tolist() for n in (50, 31, 12, 44)]  # every step trains on all of them
STEPS, LEARNING_RATE, BIAS_RATE = 3, 0.1, 0.01


def publish(folder: Path, model_type: str, **changes: Any) -> None:
    built(model_type, **changes).save_pretrained(folder / "model")
    (folder / "rows.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in ROWS))


def command(folder: Path, output: str, more: str) -> str:
    return (
        f"--model_name_or_path {folder}/model --data_path {folder}/rows.jsonl --output_dir {folder}/{output} "
        f"--model_max_length {LENGTH} --optim sgd --learning_rate {LEARNING_RATE} --lr_scheduler_type constant "
        f"--max_grad_norm 0 --logging_steps 1 {more}"
    )


def reference(
    folder: Path, coefficient: float, bias_rate: float
) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """Trains in plain transformers on one process. Returns losses and router losses, and the tensors at the end."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, attn_implementation="eager")
    batch = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in ROWS], batch_first=True, padding_value=0)
    mask = torch.tensor([[i < len(row) for i in range(batch.shape[1])] for row in ROWS])
    labels = batch.masked_fill(~mask, -100)
    chosen, found = dict[str, Tensor](), []
    for name, experts in experts_modules(model):
        experts.register_forward_pre_hook(lambda _, args, name=name: chosen.update({name: args[1]}))
    for _ in range(STEPS):
        aux = {"output_router_logits": True} if coefficient else {}
        output = model(input_ids=batch, labels=labels, attention_mask=mask.long(), use_cache=False, **aux)
        output.loss.backward()
        router_loss = output.aux_loss.item() if coefficient else 0.0
        found.append((output.loss.item() - coefficient * router_loss, router_loss))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= LEARNING_RATE * parameter.grad
                    parameter.grad = None
            for name, choices in chosen.items() if bias_rate else ():
                load = torch.bincount(choices[mask.flatten()].flatten(), minlength=4)
                gate = model.get_submodule(name.rpartition(".")[0] + ".gate")
                for i in range(4):
                    gate.e_score_correction_bias[i] += bias_rate * float(torch.sign(load.float().mean() - load[i]))
    return found, model.state_dict()


def check_run(folder: Path, output: str, found: list[tuple[float, float]], tensors: dict[str, Tensor]) -> None:
    records = [x for x in read_records(folder / output / "metrics.jsonl") if "loss" in x]
    assert [x["loss"] for x in records] == pytest.approx([loss for loss, _ in found], rel=1e-5)
    assert [x["router_loss"] or 0.0 for x in records] == pytest.approx([loss for _, loss in found], rel=1e-5)
    saved = AutoModelForCausalLM.from_pretrained(folder / output / f"checkpoint-{STEPS}").state_dict()
    for name, tensor in tensors.items():
        error = 1e-6 if name.endswith(BIAS) else 1e-4
        torch.testing.assert_close(saved[name], tensor, rtol=error, atol=error, msg=name)


def run(world: int, *lines: str) -> None:
    for ends in spawn(world, programs, "any", list(lines)):
        assert [end.status for end in ends] == [0] * len(lines), ends[-1].err


@pytest.mark.slow
@pytest.mark.parametrize(("world", "flags"), [(2, "--expert_parallel_size 2"), (3, "")])
def test_the_models_own_coefficient_trains_with_the_router_loss(world: int, flags: str, tmp_path: Path) -> None:
    publish(tmp_path, "mixtral", output_router_logits=True)
    found, tensors = reference(tmp_path, COEFFICIENT, 0.0)
    flags += f" --per_device_train_batch_size 4 --max_steps {STEPS} --save_steps {STEPS}"
    run(world, command(tmp_path, "out", flags))
    check_run(tmp_path, "out", found, tensors)


@pytest.mark.compat("5.20")
@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (2, "--per_device_train_batch_size 2 --gradient_accumulation_steps 2"),
        pytest.param(2, "--sequence_parallel_size 1 --gradient_accumulation_steps 2", marks=pytest.mark.slow),
        pytest.param(3, "--per_device_train_batch_size 4 --remat full", marks=pytest.mark.slow),
        pytest.param(2, "--per_device_train_batch_size 4 --expert_parallel_size 2", marks=pytest.mark.slow),
    ],
)
def test_biases_move_toward_equal_loads_and_survive_a_resume(world: int, flags: str, tmp_path: Path) -> None:
    publish(tmp_path, "deepseek_v3")
    found, tensors = reference(tmp_path, 0.0, BIAS_RATE)
    flags += f" --router_bias_update_rate {BIAS_RATE} --save_steps 1 --max_steps"
    first = command(tmp_path, "out", f"{flags} 2")
    run(world, first, command(tmp_path, "out", f"{flags} {STEPS} --resume_from_checkpoint auto"))
    check_run(tmp_path, "out", found, tensors)
    moved = tensors[next(name for name in tensors if name.endswith(BIAS))]
    assert moved.abs().min() > BIAS_RATE / 2, "the loads differ"


def refusals(rank: int) -> list[str]:
    lines = []
    for model_type, flags in (
        ("mixtral", "--router_bias_update_rate 0.1"),
        ("deepseek_v3", "--router_aux_loss_coef 0.1"),
        ("llama", "--router_aux_loss_coef 0.1"),
    ):
        config = parse([*NEEDED, *flags.split()], "")
        model = built(model_type)
        with pytest.raises(ValueError) as caught:
            make_routers(config, model, hf.enable(model, length=LENGTH))
        lines.append(str(caught.value))
    return lines


def test_models_without_what_a_flag_needs_are_refused() -> None:
    with one_process():
        first, second, third = refusals(0)
    assert first.startswith("--router_bias_update_rate 0.1 needs routers with a buffer e_score_correction_bias")
    assert second.startswith("--router_aux_loss_coef 0.1: DeepseekV3ForCausalLM has no router loss in transformers")
    assert third.startswith("--router_aux_loss_coef 0.1: LlamaForCausalLM has no router loss in transformers")
