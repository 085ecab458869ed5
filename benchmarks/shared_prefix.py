"""Benchmark of answers to one prompt: rows as a tree, which has the prompt once, beside the same rows one by one.

`attention` times one layer's attention, forward and backward: the tree's on one GPU and on all, beside causal documents
with as many visible pairs. `step` times a policy gradient's update: both forms of the rows in one process, whose losses
and gradients have to agree. The time that a tree should take comes from the rows one by one: of all shapes, a fit gives
seconds for a token and for a visible pair. `reached` is that time over the tree's. `trl` times the same update on one
GPU by TRL's AsyncGRPOTrainer, whose rows are trees, too (step_peers/trl_tree.py).

Layers are compiled on GPUs, and recompute everything but attention. Adapters train on all ranks alike, whole models
under FSDP2. The numbers count all tokens and pairs of a row once for each time that they are computed.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Instead of this folder, whose modules would hide packages.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import argparse
import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from math import isqrt
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.attention_flags import Choice
from benchmarks.command_line import Parser, check_output, listed, one_of, positive
from benchmarks.layers import lightseq_layer, single_gpu_layer
from benchmarks.measure import Case, time_layer
from benchmarks.records import append, provenance
from benchmarks.step_models import model_of
from benchmarks.step_peers.peer import Job, StepOutcome, measure, plain_tensor
from lightseq import hf
from lightseq.attention.context import SequenceContext
from lightseq.config.lengths import format_tokens
from lightseq.config.train_config import TrainConfig
from lightseq.distributed.agreement import on_all_ranks
from lightseq.distributed.start import init_distributed
from lightseq.distributed.world import World, use_host_cores
from lightseq.memory.remat import apply_remat
from lightseq.models.decoder import decoder_layers, ids_of_text, text_config
from lightseq.parts.adapters import lora_from_config
from lightseq.parts.compilation import allow_graphs_per_length
from lightseq.parts.facts import heads_of
from lightseq.schedule.nodes import Nodes
from lightseq.tools.plan.answers import Answers, answers_of
from lightseq.utils.tensors import IGNORE_INDEX

EXAMPLES = """examples:
  python3 -m torch.distributed.run --nproc_per_node=2 benchmarks/shared_prefix.py --model llama3.2-1b
  python3 benchmarks/shared_prefix.py --parts attention --model llama3.2-1b --shapes 8x32K+2K"""
PARTS = ("attention", "step", "trl")
FORMS = ("rows", "tree")
SET_UPS = {
    "one GPU": partial(single_gpu_layer, kernel="auto"),
    "all ranks": partial(lightseq_layer, choice=Choice("auto")),
}
TIMEOUT_SECONDS = 600.0  # until ranks stop waiting for a dead rank


@dataclass(frozen=True)
class Shape(Answers):
    """Answers to one prompt, with their tokens."""

    def __str__(self) -> str:
        return f"{self.rows}x{format_tokens(self.prompt)}+{format_tokens(self.answer)}"

    def ids(self, vocabulary: ArrayLike) -> list[list[int]]:
        """Returns the tokens of all rows, the same on every rank. Answers differ in their first token."""
        draw, tokens = torch.Generator().manual_seed(0), torch.as_tensor(vocabulary)
        prompt = tokens[torch.randint(len(tokens), (self.prompt,), generator=draw)].tolist()
        answers = tokens[torch.randint(len(tokens), (self.rows, self.answer), generator=draw)]
        answers[:, 0] = tokens[: self.rows]
        return [prompt + answer for answer in answers.tolist()]

    def nodes(self, form: str) -> Nodes:
        """Returns the documents that a step computes in one form of the rows."""
        if form == "tree":
            return self.tree
        size = self.prompt + self.answer
        return Nodes(tuple(range(0, self.rows * size + 1, size)))


def shape_of(text: str) -> Shape:
    """Converts `8x32K+2K`: 8 answers of 2K tokens to a prompt of 32K."""
    try:
        return Shape(**vars(answers_of(text)))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no shape; write 8x32K+2K for 8 answers of 2K to a prompt of 32K"
        ) from None


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parses the flags. Raises ValueError with a one-line reason."""
    out = Parser("benchmarks/shared_prefix.py", __doc__, EXAMPLES)
    add = out.add_argument
    add("--model", default="llama3.2-1b", metavar="NAME", help="preset, or directory with config.json; random weights")
    shapes, parts_of_shape = "8x32K+2K,16x8K+1K,64x2K+256", "rows, tokens of prompt and answer"
    add("--shapes", type=listed(shape_of), default=shapes, metavar="NxP+A,...", help=parts_of_shape)
    parts = listed(one_of(*PARTS), PARTS)
    add("--parts", type=parts, default="attention,step", metavar="P,...", help=f"all, {', '.join(PARTS)}")
    forms = "forms of the rows that `step` times; rows one by one need more memory"
    add("--forms", type=listed(one_of(*FORMS), FORMS), default="rows,tree", metavar="F,...", help=forms)
    add("--lora_rank", type=positive, metavar="N", help="train LoRA adapters of this rank (default: all weights)")
    add("--warmup", type=positive, default=2, metavar="N", help="untimed steps of each form and shape")
    add("--steps", type=positive, default=3, metavar="N", help="timed steps of each form and shape")
    add("--repeats", type=positive, default=20, metavar="N", help="timed runs of attention, at most")
    out.add_output("outputs/shared_prefix.jsonl")
    flags = out.parse_args(words)
    flags.seconds = 3.0  # of all timed runs of one attention layer
    check_output(flags)
    return flags


def main(words: Sequence[str]) -> None:
    if {"-h", "--help"} & set(words):
        parse(words)
    with init_distributed(TIMEOUT_SECONDS) as world:
        flags = on_all_ranks(world, lambda: parse(words))
        if "trl" in flags.parts:
            on_all_ranks(world, lambda: check_trl(world))
        use_host_cores(world)
        record = Recorder(flags, world, words)
        config = on_all_ranks(world, lambda: model_of(flags.model)[1])
        lora = lora_from_config(
            TrainConfig(model_name_or_path="", data_path="", output_dir="", lora_rank=flags.lora_rank), config
        )
        longest = max(shape.nodes("rows").length for shape in flags.shapes)
        job = Job(config, longest, world, learning_rate=0.0, lora=lora)  # both forms see the same weights
        if "attention" in flags.parts:
            measure_attention(flags, job, record)
        if "step" in flags.parts:
            measure_steps(flags, job, record)
        if "trl" in flags.parts:
            measure_trl(flags, job, record)


class Recorder:
    """Output of the main rank: a line on the terminal and a record in the file for each measurement."""

    def __init__(self, flags: argparse.Namespace, world: World, words: Sequence[str]) -> None:
        self._output, self._is_main = flags.output, world.is_main
        launch = f"-m torch.distributed.run --nproc_per_node={world.size} " if world.size > 1 else ""
        self._about = {
            "benchmark": "shared_prefix",
            "command": f"python3 {launch}benchmarks/shared_prefix.py {shlex.join(words)}",
            "world": world.size,
            "model": flags.model,
            "lora_rank": flags.lora_rank,
            **provenance(flags.commit, world.device),
        }

    def __call__(self, line: str, record: Mapping[str, Any]) -> None:
        if self._is_main:
            append(self._output, {**record, **self._about})
            print(line, flush=True)


# ---- attention ------------------------------------------------------------------------------------------------------


def measure_attention(flags: argparse.Namespace, job: Job, record: Recorder) -> None:
    """Times attention of trees, and of one causal document with as many pairs."""
    for shape in flags.shapes:
        tree = shape.nodes("tree")
        pairs = int(tree.area_before(np.array([tree.length]))[0])
        causal = Nodes((0, -(-isqrt(2 * pairs) // 128) * 128))
        speeds = dict[tuple[str, str], float]()
        for form, nodes in (("causal", causal), ("tree", tree)):
            case = case_of(job, nodes)
            for where, set_up in SET_UPS.items():
                with set_up(case) as layer:
                    found = time_layer(layer, case, flags)
                speeds[form, where] = found["tflops_per_gpu"]
                line = f"{shape!s:>12}  attention, {form} of {format_tokens(nodes.length)} on {where}: "
                line += f"{found['tflops_per_gpu']:.3g} TFLOP/s a GPU, {1e3 * found['seconds_median']:.2f} ms"
                if form == "tree":
                    line += f", {speeds[form, where] / speeds['causal', where]:.0%} of the causal document's speed"
                about = {"part": "attention", "shape": str(shape), "form": form, "where": where, "pairs": pairs}
                record(line, {**about, "tokens": nodes.length, **found})


def case_of(job: Job, nodes: Nodes) -> Case:
    config, heads = text_config(job.config), heads_of(job.config)
    assert dist.group.WORLD is not None
    return Case(
        nodes.length, config.num_attention_heads, config.num_key_value_heads, heads.dim, job.dtype, job.world.device,
        dist.group.WORLD, nodes.boundaries if nodes.parents else (), parents=nodes.parents,
    )  # fmt: skip


# ---- steps ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Update:
    """Policy gradient of a trainable model on the answers to one prompt."""

    context: SequenceContext
    model: nn.Module
    optimizer: torch.optim.Optimizer
    advantages: Tensor  # (rows,)
    targets: int

    def __call__(self, batch: Mapping[str, Any]) -> StepOutcome:
        sums = hf.sequence_sums(self.context, hf.token_log_probs(self.context, self.model, batch), batch)
        loss = -(self.advantages * sums).sum() / self.targets
        loss.backward()
        trained = [x for x in self.model.parameters() if x.requires_grad]
        if not hasattr(self.model, "unshard"):  # FSDP2 sums by itself
            for x in trained:
                dist.all_reduce(x.grad)
        norm = plain_tensor(nn.utils.clip_grad_norm_(trained, torch.inf))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return StepOutcome(loss.detach() / dist.get_world_size(), norm)


def measure_steps(flags: argparse.Namespace, job: Job, record: Recorder) -> None:
    """Times updates of all shapes in both forms, and compares trees' with what their tokens and pairs should take."""
    found = dict[tuple[Shape, str], dict[str, Any]]()
    with trainable(job) as (model, context):
        optimizer = job.adamw(model)
        for shape in flags.shapes:
            for form in flags.forms:
                numbers = found[shape, form] = time_updates(flags, job, context, model, optimizer, shape, form)
                record(step_line(shape, form, numbers), {"part": "step", "shape": str(shape), "form": form, **numbers})
    if len(flags.shapes) < 2 or set(flags.forms) != set(FORMS):
        return
    per_token, per_pair = costs([found[shape, "rows"] for shape in flags.shapes])
    for shape in flags.shapes:
        rows, tree = found[shape, "rows"], found[shape, "tree"]
        expected = per_token * tree["tokens"] + per_pair * tree["pairs"]
        faster, reached = rows["seconds"] / tree["seconds"], expected / tree["seconds"]
        line = f"{shape!s:>12}  step: tree {faster:.2f} x as fast as rows, {reached:.0%} of what tokens and pairs give"
        about = {"part": "fit", "shape": str(shape), "seconds_per_token": per_token, "seconds_per_pair": per_pair}
        record(line, {**about, "times_as_fast": faster, "expected_seconds": expected, "reached": reached})


def time_updates(
    flags: argparse.Namespace, job: Job, context: SequenceContext, model: nn.Module, optimizer: torch.optim.Optimizer,
    shape: Shape, form: str,
) -> dict[str, Any]:  # fmt: skip
    rows = shape.ids(ids_of_text(job.config))
    advantages = torch.linspace(-1, 1, shape.rows, device=job.world.device)
    update = Update(context, model, optimizer, advantages, shape.rows * shape.answer)
    batch = tree_batch(context, rows, shape) if form == "tree" else packed_batch(context, rows, shape)
    steps = measure(lambda _: update(batch), range(flags.warmup + flags.steps), job.world.device)
    nodes = shape.nodes(form)
    return {
        "tokens": nodes.length,
        "pairs": int(nodes.area_before(np.array([nodes.length]))[0]),
        "seconds": statistics.median(steps["step_seconds"][flags.warmup :]),
        "warmup": flags.warmup,
        **steps,
    }


def check_trl(world: World) -> None:
    """Raises ValueError if TRL's trainer cannot take a part in the comparison."""
    if find_spec("trl") is None:
        raise ValueError("--parts trl needs TRL, which is not installed; leave trl out")
    if world.size > 1:
        raise ValueError(f"--parts trl: {world.size} ranks cannot share a row in TRL; start one process")


def measure_trl(flags: argparse.Namespace, job: Job, record: Recorder) -> None:
    """Times updates of all shapes by TRL's tree row."""
    from benchmarks.step_peers.trl_tree import TreeUpdate

    update = TreeUpdate(job)
    for shape in flags.shapes:
        rows = shape.ids(ids_of_text(job.config))
        batch = update.batch(rows, shape.prompt, torch.linspace(-1, 1, shape.rows))
        steps = measure(partial(update, batch), range(flags.warmup + flags.steps), job.world.device)
        numbers = {
            "tokens": batch["input_ids"].numel(),
            "seconds": statistics.median(steps["step_seconds"][flags.warmup :]),
            "warmup": flags.warmup,
        }
        line = step_line(shape, "TRL's tree", numbers | steps)
        record(line, {"part": "trl", "shape": str(shape), "form": "trl tree", **numbers, **steps})


def tree_batch(context: SequenceContext, rows: Sequence[list[int]], shape: Shape) -> dict[str, Any]:
    return hf.shard_rows(context, rows, [[0.0] * shape.prompt + [1.0] * shape.answer for _ in rows])


def packed_batch(context: SequenceContext, rows: Sequence[list[int]], shape: Shape) -> dict[str, Any]:
    labels = [[IGNORE_INDEX] * shape.prompt + row[shape.prompt :] for row in rows]
    ids, targets = (torch.tensor(x, device=context.config.device).view(1, -1) for x in (rows, labels))
    return hf.shard_batch(context, ids, labels=targets, cu_seqlens=shape.nodes("rows").boundaries)


@contextmanager
def trainable(job: Job) -> Iterator[tuple[nn.Module, SequenceContext]]:
    """Builds the model with sequences split over all ranks, as a user's own loop would."""
    model: Any = job.whole_model()
    layers: Any = decoder_layers(model)
    context = hf.enable(model, packed=True, length=job.length, dtype=job.dtype)
    if job.lora:
        rank = job.lora.rank
        model = get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))
    apply_remat(layers, "attention", job.on_gpu)
    if job.on_gpu:
        allow_graphs_per_length()
        for layer in layers:
            layer.forward = torch.compile(layer.forward)
    if not job.lora:
        policy = MixedPrecisionPolicy(param_dtype=job.dtype, reduce_dtype=torch.float32)
        for layer in layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=replace(policy, output_dtype=torch.float32), reshard_after_forward=False)
    yield model, context
    hf.disable(model)


def costs(measured: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Returns seconds for a token and for a visible pair, by least squares of relative errors."""
    table = np.array([[x["tokens"] / x["seconds"], x["pairs"] / x["seconds"]] for x in measured])
    per_token, per_pair = np.linalg.lstsq(table, np.ones(len(measured)), rcond=None)[0]
    return float(per_token), float(per_pair)


def step_line(shape: Shape, form: str, numbers: Mapping[str, Any]) -> str:
    peak = numbers["peak_memory_allocated_bytes"]
    memory = "" if peak is None else f", {peak / 2**30:.1f} GiB"
    loss = f"loss {numbers['losses'][0]:.5f}, gradient norm {numbers['grad_norms'][0]:.5f}"
    return (
        f"{shape!s:>12}  step, {form} of {format_tokens(numbers['tokens'])}: {numbers['seconds']:.3f} s{memory}, {loss}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
