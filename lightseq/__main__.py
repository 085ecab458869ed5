"""Training and the tools around it: python3 -m lightseq schedule --schedule balanced --ranks 8

python3 -m lightseq plan --attention --gpus 1,8,64 --gpus_per_host 8 --length 1M --output outputs/plan.jsonl
"""

import argparse
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import llama2
import llama3
from lightseq import evaluate, plan_cli, planner, rehearsal, training, verify
from lightseq.lengths import tokens
from lightseq.merge import add_flags as add_merge
from lightseq.merge import merge
from lightseq.presets import Family
from lightseq.schedule import SCHEDULES, make_schedule
from lightseq.schedule_cost import AttentionShape
from lightseq.schedule_proof import validate
from lightseq.schedule_render import render

BOTH = Family(
    "llama2 or llama3",
    {**llama2.FAMILY.presets, **llama3.FAMILY.presets},
    {**llama2.FAMILY.aliases, **llama3.FAMILY.aliases},
    llama3.FAMILY.grown,
)


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)
    if words and words[0] in FLAGS_OF_TRAINING and "--attention" not in words:
        return FLAGS_OF_TRAINING[words[0]](BOTH, words[1:])
    arguments = parser().parse_args(words)
    try:
        COMMANDS[arguments.command](arguments, words)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="python3 -m lightseq", description=(__doc__ or "").splitlines()[0])
    commands = out.add_subparsers(dest="command", required=True)
    draw = commands.add_parser("schedule", help="prove a schedule and draw its table")
    draw.add_argument("--schedule", required=True, help=", ".join(SCHEDULES))
    draw.add_argument("--ranks", type=int, required=True, help="ranks that share a sequence")
    draw.add_argument(
        "--head_groups", type=int, default=1, help="groups of heads that are fetched and computed one by one"
    )
    draw.add_argument("--ulysses_size", type=int, help="ranks that share a place of the sequence and split its heads")
    add_merge(commands.add_parser("merge", help="add a trained adapter (--lora_rank) to the weights of its model"))
    add_plan(
        commands.add_parser(
            "plan",
            help="predict memory and time of a training run; with --attention: of a layer over clusters of many sizes",
        )
    )
    commands.add_parser("train", help="train a causal language model of transformers across ranks")
    commands.add_parser("rehearse", help="run a step without attention's arithmetic, to see whether a length fits")
    commands.add_parser("verify", help="compare distributed loss and gradients with one process, on your flags")
    commands.add_parser("evaluate", help="measure loss by position, or retrieval, under sequence parallelism")
    return out


def add_plan(plan: argparse.ArgumentParser) -> None:
    plan.add_argument("--attention", action="store_true", required=True, help="one attention layer, forward + backward")
    plan.add_argument("--gpus", default="1,2,4,8,16,32,64", help="numbers of GPUs (default: %(default)s)")
    plan.add_argument("--gpus_per_host", type=int, default=8, help="neighbouring ranks of one host (default: 8)")
    plan.add_argument("--length", default="128K", help="tokens of the whole sequence: 131072, 128K, 1M (default: 128K)")
    plan.add_argument("--heads", type=int, default=32, help="query heads (default: 32)")
    plan.add_argument("--kv_heads", type=int, default=8, help="key/value heads (default: 8)")
    plan.add_argument("--head_dim", type=int, default=128, help="(default: 128)")
    plan.add_argument("--schedules", default="all", help=f"all, or from {', '.join(SCHEDULES)}")
    plan.add_argument("--gathered_limit_gib", type=float, help="of other ranks' tensors that a GPU may hold at once")
    plan.add_argument(
        "--calibrate", type=Path, metavar="FILE", help="fit the rates to records of benchmarks/attention.py"
    )
    plan.add_argument("--kernel", help="the kernel whose records count, where FILE has several")
    plan.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help="JSONL, for python3 -m analysis cluster"
    )


def draw_schedule(arguments: argparse.Namespace, words: Sequence[str]) -> None:
    schedule = make_schedule(arguments.schedule, arguments.ranks, arguments.head_groups, arguments.ulysses_size)
    validate(schedule)
    print(render(schedule))


def merge_adapter(arguments: argparse.Namespace, words: Sequence[str]) -> None:
    print(merge(arguments.adapter, arguments.output_dir, arguments.model_name_or_path))


def plan_attention(arguments: argparse.Namespace, words: Sequence[str]) -> None:
    length = tokens(arguments.length, "--length")
    shape = AttentionShape(length, arguments.heads, arguments.kv_heads, arguments.head_dim)
    planner.check_shape(shape)
    gpus, names = planner.gpu_counts(arguments.gpus), planner.schedule_names(arguments.schedules)
    if arguments.gpus_per_host < 1:
        raise ValueError(f"--gpus_per_host {arguments.gpus_per_host} must be at least 1")
    limit = arguments.gathered_limit_gib
    cluster = planner.cluster_of(arguments.gpus_per_host, arguments.calibrate, arguments.kernel)
    source = str(arguments.calibrate) if arguments.calibrate else "the defaults for H200"
    found = planner.rows(shape, cluster, gpus, names, None if limit is None else limit * 2**30)
    records = [planner.record(row, shape, cluster) for row in found]
    head = planner.header(f"python3 -m lightseq {shlex.join(words)}", shape, cluster, source)
    planner.write(arguments.output, [head, *records])
    print("\n".join(planner.table(records)))
    print(f"records  {arguments.output}")


def train(family: Family, words: Sequence[str]) -> int:
    training.main(family, words, "python3 -m lightseq train")
    return 0


COMMANDS: Mapping[str, Callable[[argparse.Namespace, Sequence[str]], None]] = {
    "schedule": draw_schedule,
    "plan": plan_attention,
    "merge": merge_adapter,
}
FLAGS_OF_TRAINING: Mapping[str, Callable[[Family, Sequence[str]], int]] = {
    "train": train,
    "plan": plan_cli.main,
    "rehearse": rehearsal.main,
    "verify": verify.main,
    "evaluate": evaluate.main,
}


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader such as head may have seen enough
    sys.exit(main())
