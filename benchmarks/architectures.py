"""Trains a tiny model of every causal language model class of transformers over ranks and compares it with one process.

python3 -m torch.distributed.run --nproc_per_node=2 -m benchmarks.architectures
    [--only llama,qwen3] [--output outputs/architectures.jsonl] [--csv docs/classes.csv]
    [--train_flags "--torch_compile True"]

Each class trains with and without packing, through `hf.enable` and as in `lightseq train`, and with config options that
are easy to get wrong. It must match the loss and every gradient of plain transformers, or be refused in one line.
`--csv` writes a table of all classes. With `--train_flags`, classes train only as in `lightseq train` with these flags.
The exit status is 1 if a class is wrong or raises anything but a refusal.
"""

import argparse
import copy
import json
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from benchmarks.class_table import Outcome, summary, table, write_csv
from benchmarks.command_line import NEEDED
from benchmarks.tiny_models import (
    LENGTH,
    NotBuilt,
    built_by_transformers,
    empty_timm_towers,
    ids,
    named,
    options_of,
    plain_model,
    tiny_config,
)
from lightseq import hf
from lightseq.architecture.inspection import inspect_architecture
from lightseq.attention.context import release
from lightseq.config.command_line import parse
from lightseq.distributed.parallel_dims import parallel_dims, whole_tensor
from lightseq.distributed.world import World
from lightseq.memory.recomputation import MemorySettings
from lightseq.models import weights
from lightseq.models.build import model_class
from lightseq.models.decoder import with_head
from lightseq.parallelize import parallelize
from lightseq.parts.chosen_experts import build_to_train
from lightseq.training.setup_checks import check_layers, check_packing

# Class by type of model. A type in both lists, such as Gemma 3, is a composite.
CLASSES: dict[str, str] = {**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
DOCUMENTS = (0, 13, 14, 37, 50)  # boundaries of a packed batch
LOSS_ERROR, GRADIENT_ERROR = 1e-4, 1e-3  # errors in float32 over two ranks are ten times smaller
CPU = torch.device("cpu")


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="model types, separated by commas (default: all of transformers)")
    parser.add_argument("--output", type=Path, default=Path("outputs/architectures.jsonl"))
    parser.add_argument("--csv", type=Path, help="table of classes to write, a row for each")
    parser.add_argument("--train_flags", default="", help="flags of `lightseq train`; only that way of training runs")
    asked = parser.parse_args(words)
    known = [*CLASSES]
    names = asked.only.split(",") if asked.only else known
    if unknown := [name for name in names if name not in known]:
        parser.error(f"--only {unknown[0]} is no model of transformers that generates text {transformers.__version__}")
    train_flags = shlex.split(asked.train_flags)
    if train_flags and asked.csv is not None:
        parser.error("--csv lists every way of training, but --train_flags runs one; leave one of them out")
    try:
        parse([*NEEDED, *train_flags], "")
    except ValueError as error:
        parser.error(f"--train_flags: {error}")
    empty_timm_towers()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    outcomes = [outcome for name in names for outcome in tried(name, train_flags)]
    if dist.get_rank() == 0:
        asked.output.parent.mkdir(parents=True, exist_ok=True)
        asked.output.write_text("".join(json.dumps(asdict(outcome)) + "\n" for outcome in outcomes))
        if asked.csv is not None:
            write_csv(asked.csv, table(outcomes))
        print(*summary(outcomes), sep="\n")
    dist.destroy_process_group()
    return int(any(outcome.kind in ("wrong", "raised") for outcome in outcomes))


def tried(model_type: str, train_flags: Sequence[str] = ()) -> Iterator[Outcome]:
    """Trains one class in every way and yields the outcomes, in the same order on every rank.

    With `train_flags`, it trains only as in `lightseq train`, with these flags.
    """

    def outcome(way: str, compare: Callable[..., str], packed: bool = False, **changes: Any) -> Outcome:
        torch.compiler.reset()  # torch compiles a function for a limited number of models
        kind, line = judged(lambda: compare(tiny_config(model_type, **changes), packed))
        return Outcome(model_type, CLASSES[model_type], way, kind, line)

    compare_training_with = partial(compare_training, flags=train_flags)
    if not train_flags:
        loop = outcome("loop", compare_loop)
        if loop.kind == "not built":  # the published size may still be refused, on the meta device
            kind, line = judged(lambda: enabled_on_meta(model_type))
            yield replace(loop, kind=kind, line=line) if kind == "refused" else loop
            if (train := outcome("train", compare_training_with)).kind == "exact":  # Llama 4's composite
                yield train
            return
        yield loop
        if loop.kind == "exact":
            yield outcome("loop packed", compare_loop, packed=True)
            checkpointed = outcome("loop checkpointed", partial(compare_loop, checkpointed=True))
            if checkpointed.kind != "not built":  # the class has gradient checkpointing
                yield checkpointed
            for option, changes in options_of(tiny_config(model_type)):
                if (found := outcome(option, compare_loop, **changes)).kind != "not built":  # the class has the option
                    yield found
    yield (train := outcome("train", compare_training_with))
    if train.kind == "exact":
        yield outcome("train packed", compare_training_with, packed=True)


def judged(run: Callable[[], str]) -> tuple[str, str]:
    """Runs a comparison and returns the kind and the line of its outcome on this rank."""
    try:
        return "exact", run()
    except AssertionError as error:
        return "wrong", str(error)
    except NotBuilt as error:
        return "not built", str(error)
    except ValueError as error:
        lines = str(error).strip().splitlines()
        return ("refused" if len(lines) == 1 else "raised"), lines[0]
    except Exception as error:  # refusals are ValueErrors
        return "raised", named(error)


def enabled_on_meta(model_type: str) -> str:
    """Enables the published size on the meta device, which raises a refusal; raises NotBuilt if it is accepted."""
    with built_by_transformers():
        with torch.device("meta"):
            config = CONFIG_MAPPING[model_type]()
            model = model_class(config)._from_config(config)
    release(hf.enable(model, length=LENGTH, device=CPU))
    raise NotBuilt("accepted")


# ---- comparisons ---------------------------------------------------------------------------------------------------


def expect(model: PreTrainedModel, packed: bool) -> float:
    """Runs one process and returns its loss; gradients stay in the model. Packed documents run one by one."""
    with built_by_transformers():
        if not packed:
            loss = model(input_ids=ids(), labels=ids(), use_cache=False).loss
        else:
            pieces = ids().split([end - start for start, end in pairwise(DOCUMENTS)], dim=1)
            pieces = [piece for piece in pieces if piece.shape[1] > 1]  # a document of one token has no target
            sums = [
                nn.functional.cross_entropy(
                    model(input_ids=x, use_cache=False).logits[0, :-1], x[0, 1:], reduction="sum"
                )
                for x in pieces
            ]
            loss = torch.stack(sums).sum() / sum(x.shape[1] - 1 for x in pieces)
        loss.backward()
    return loss.item()


def compare_loop(config: PreTrainedConfig, packed: bool, checkpointed: bool = False) -> str:
    """Compares a user's own loop around `hf.enable` with one process. Returns the errors.

    `checkpointed` turns transformers' gradient checkpointing on in the loop.
    """
    want = plain_model(config)
    got = copy.deepcopy(want)
    if checkpointed:
        with built_by_transformers():
            got.gradient_checkpointing_enable()
        for layer in got.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                layer.training = True  # not the modules inside, of which some draw random numbers
    expected = expect(want, packed)
    context = hf.enable(got, length=LENGTH)
    try:
        loss = got(**hf.shard_batch(context, ids(), ids(), cu_seqlens=DOCUMENTS if packed else None)).loss
        loss.backward()
    finally:
        release(context)
    total = loss.detach().clone()
    dist.all_reduce(total)
    gradients = {}
    for name, parameter in got.named_parameters():
        gradients[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(gradients[name])
    return compared(total.item(), gradients, want, expected)


def compare_training(config: PreTrainedConfig, packed: bool, flags: Sequence[str] = ()) -> str:
    """Compares a step of `lightseq train` without its optimizer with one process. Returns the errors.

    A composite with a whole language model inside is compared with that: Llama 4's own code fails on text.
    """
    packing = ["--packing", "best_fit"] if packed else []
    run = parse([*NEEDED, "--model_max_length", str(LENGTH), *packing, *flags], "")
    check_layers(run, inspect_architecture(config))
    if packed:
        check_packing(run.packing, config)
    want = plain_model(config)
    state = {name: tensor.clone() for name, tensor in want.state_dict().items()}
    expected = expect(with_head(want), packed)
    world = World(dist.get_rank(), dist.get_world_size(), dist.get_rank(), dist.get_world_size(), CPU)
    model = build_to_train(copy.deepcopy(config)).eval()
    parallel = parallelize(model, run, parallel_dims(world, expert_size=run.expert_ranks), MemorySettings())
    weights.materialize(model, CPU)
    for name, parameter in weights.base_parameters(model).items():
        weights.fill(parameter, state[name].__getitem__)
    batch = hf.shard_batch(parallel.context, ids(), ids(), cu_seqlens=DOCUMENTS if packed else None)
    loss = parallel.loss_model(batch["input_ids"], batch["position_ids"], batch["labels"], batch.get("documents"))
    loss = loss / batch["num_items_in_batch"]
    loss.backward()
    release(parallel.context)
    total = loss.detach().clone()
    dist.all_reduce(total)
    gradients = {name: whole_tensor(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return compared(total.item(), gradients, want, expected)


def compared(loss: float, gradients: dict[str, Tensor], want: PreTrainedModel, expected: float) -> str:
    off = abs(loss - expected)
    assert off < LOSS_ERROR, f"loss {loss:.6f}, one process has {expected:.6f}"
    whole = torch.stack([p.grad.norm() for p in want.parameters() if p.grad is not None]).norm().item()
    worst, where = 0.0, "no parameter"
    for name, parameter in want.named_parameters():
        right = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        missed = gradients.get(name, torch.zeros_like(parameter)) - right
        error = (missed.norm() / right.norm().clamp_min(1e-4 * whole)).item()
        worst, where = max((worst, where), (error, name))
    assert worst < GRADIENT_ERROR, f"gradient of {where} off by {worst:.1e}"
    return f"loss within {off:.0e}, gradients within {worst:.0e}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
