"""Benchmark of GRPO's training part: lightseq's trainer, which splits completions over all ranks, beside TRL's own."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Instead of this folder, whose modules would hide packages.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import argparse
import json
import shlex
import statistics
from collections.abc import Mapping, Sequence
from os.path import relpath
from typing import Any

from benchmarks.command_line import Parser, check_output, length, listed, one_of, positive, seconds
from lightseq.config.parser import run_command

ABOUT = """Times updates of GRPO on completions that are drawn, not generated, with the same weights and completions in
both trainers, and compares their log-probabilities. `lightseq` splits every micro-batch over all processes; `trl` gives
each process completions of its own.
"""
EXAMPLES = """examples:
  python3 benchmarks/grpo.py --model qwen3-4b --completions 16K,32K --lora_rank 16 --nproc_per_node 2
  ... --also eager,stored"""
IMPLEMENTATIONS = ("lightseq", "trl")
VARIANTS = {"eager": ["--eager"], "stored": ["--keep_activations"]}
WORKER = Path(__file__).resolve().parent / "step_peers" / "grpo.py"


def main(words: Sequence[str]) -> int:
    return run_command(lambda: _compare(parse(words), words))


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parses the flags. Raises ValueError with a one-line reason."""
    out = Parser("benchmarks/grpo.py", ABOUT, EXAMPLES)
    what = out.add_argument_group("training").add_argument
    what("--model", required=True, metavar="NAME", help="preset, or directory with config.json; weights are random")
    what("--prompt", type=length, default="2K", metavar="N", help="tokens of the prompt that all completions share")
    what("--completions", type=listed(length), default="16K,32K", metavar="N,...", help="tokens of a completion")
    what("--generations", type=positive, default=8, metavar="N", help="completions of the prompt; an update has one")
    rows = "completions of a micro-batch for each process"
    what("--rows", type=positive, default=1, metavar="N", help=rows)
    what("--lora_rank", type=positive, metavar="N", help="train LoRA adapters of this rank (default: all weights)")
    names = listed(one_of(*IMPLEMENTATIONS), IMPLEMENTATIONS)
    what("--implementations", type=names, default="all", metavar="I,...", help=f"all, {', '.join(IMPLEMENTATIONS)}")
    what("--nproc_per_node", type=positive, default=2, metavar="N", help="processes, one per GPU")
    how = out.add_argument_group("measurement").add_argument
    how("--warmup", type=positive, default=1, metavar="N", help="untimed updates before the measurement")
    how("--updates", type=positive, default=2, metavar="N", help="timed updates")
    how("--timeout", type=seconds, default=900.0, metavar="S", help="time limit for one trainer at one length")
    more = f"also measure lightseq without compiled layers, or with all activations stored: {', '.join(VARIANTS)}"
    how("--also", type=listed(one_of(*VARIANTS)), default=[], metavar="V,...", help=more)
    out.add_output("outputs/grpo.jsonl")
    flags = out.parse_args(words)
    check_output(flags, logs_beside=True)
    if flags.generations % (flags.rows * flags.nproc_per_node):
        raise ValueError(
            f"--generations {flags.generations} is not divisible by --rows x --nproc_per_node = "
            f"{flags.rows * flags.nproc_per_node}; give a multiple"
        )
    return flags


def _compare(flags: argparse.Namespace, words: Sequence[str]) -> None:
    from benchmarks.records import append, provenance  # imports torch, which takes seconds
    from benchmarks.step_models import model_of

    model = flags.output.with_suffix("") / "model"
    model_of(flags.model)[1].save_pretrained(model)
    about = {"command": f"python3 benchmarks/grpo.py {shlex.join(words)}", **provenance(flags.commit)}
    for completion in flags.completions:
        found = dict[str, Path]()
        for name, variant in _trials(flags):
            label = f"{name} {variant}".strip()
            more = VARIANTS.get(variant, [])
            result = flags.output.with_suffix("") / f"{label.replace(' ', '-')}-{completion}.json"
            record = {
                "benchmark": "grpo",
                "label": label,
                "completion": completion,
                **_take(flags, model, name, completion, more, result),
            }
            if record["skipped"] is None:
                found[label] = result.with_suffix(".safetensors")
                if "trl" in found and name != "trl":
                    record["log_probs_beside_trl"] = _differences(found[label], found["trl"])
            append(flags.output, {**record, **about})
            print(_line(record), flush=True)
    print(f"records  {flags.output}")


def _trials(flags: argparse.Namespace) -> list[tuple[str, str]]:
    """Returns trainers and variants, with TRL first, beside which the others are compared."""
    every = [("trl", ""), *(("lightseq", variant) for variant in ("", *flags.also))]
    return [trial for trial in every if trial[0] in flags.implementations]


def _take(
    flags: argparse.Namespace, model: Path, name: str, completion: int, more: Sequence[str], result: Path
) -> dict[str, Any]:
    """Runs one trainer at one length, and returns its numbers; `skipped` says why there are none."""
    from benchmarks.processes import Failed, run, torchrun

    command = [
        *torchrun(flags.nproc_per_node),
        *(relpath(WORKER), name, "--model", str(model), "--result", str(result)),
        *("--prompt", str(flags.prompt), "--completion", str(completion), "--generations", str(flags.generations)),
        *("--updates", str(flags.warmup + flags.updates), "--rows", str(flags.rows)),
        *("--timeout", str(flags.timeout)),
        *(["--lora_rank", str(flags.lora_rank)] if flags.lora_rank else []),
        *more,
    ]
    about: dict[str, Any] = {"trial_command": shlex.join(["python3", *command]), "world": flags.nproc_per_node}
    result.parent.mkdir(parents=True, exist_ok=True)
    try:
        run(command, flags.timeout, result.with_suffix(".log"))
    except Failed as failed:
        return {**about, "skipped": str(failed)}
    numbers = json.loads(result.read_text())
    times = numbers["step_seconds"][flags.warmup :]
    tokens = flags.generations * (flags.prompt + completion)
    return {
        **about,
        "skipped": None,
        "tokens_per_second": tokens / statistics.median(times),
        "tokens_per_second_lowest": tokens / max(times),
        "tokens_per_second_highest": tokens / min(times),
        **{name: numbers[name] for name in ("peak_memory_allocated_bytes", "losses", "grad_norms")},
    }


def _differences(ours: Path, theirs: Path) -> dict[str, float]:
    """Returns the mean and the largest difference of log-probabilities of the first update's completions."""
    import torch
    from safetensors.torch import load_file

    a, b = load_file(ours), load_file(theirs)
    differences = torch.cat([(a[key] - b[key]).abs() for key in a.keys() & b.keys()])
    return {"completions": len(a.keys() & b.keys()), "mean": float(differences.mean()), "max": float(differences.max())}


def _line(record: Mapping[str, Any]) -> str:
    head = f"{record['completion']:>6}  {record['label']}: "
    if record["skipped"] is not None:
        return f"{head}skipped, {record['skipped']}"
    peak, found = record["peak_memory_allocated_bytes"], record.get("log_probs_beside_trl")
    memory = "" if peak is None else f", {peak / 2**30:.1f} GiB"
    beside = "" if found is None else f", log-probabilities differ by {found['mean']:.2e} on average"
    return f"{head}{record['tokens_per_second']:,.0f} tokens/s{memory}{beside}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
