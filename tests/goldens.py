"""Goldens: losses, gradient norms, flags and file keys of the program as it was committed, to compare a change with.

    python tests/goldens.py make         writes tests/goldens/*.json anew (a commit that does so says why)
    python tests/goldens.py checkpoints  writes tests/goldens/checkpoints anew (the same)
    python tests/goldens.py bits FILE    writes losses and norms of this checkout to the bit: `diff` the files of two
                                         commits, made on one machine

Everything here goes through command lines and the files that a run writes.
"""

import json
import pickle
import re
import shlex
import shutil
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":  # conftest.py does the same for pytest
    import os

    sys.path[:0] = [str(ROOT)]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    os.environ["OMP_NUM_THREADS"] = "1"

from programs import Ended, programs
from transformers import LlamaConfig, LlamaForCausalLM
from worlds import spawn

HERE = Path(__file__).resolve().parent / "goldens"
COMMITTED = shlex.quote(str(HERE / "checkpoints"))  # the folder in a command line
LENGTH, VOCABULARY, STEPS = 61, 64, 3
DOCUMENTS = (61, 9, 40, 3, 61, 22, 2, 55)  # some ranks hold no valid token
MODEL = LlamaConfig(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=4, max_position_embeddings=256, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
SCHEDULES = {
    2: ("ring", "striped", "zigzag", "balanced", "prefix", "ulysses"),
    3: ("ring", "striped", "zigzag", "balanced", "prefix"),
    4: ("ring", "striped", "zigzag", "balanced", "prefix", "ulysses", "usp"),
}
VARIANTS = {
    "plain": "--per_device_train_batch_size 2",
    "packed": "--packing best_fit",
    "accumulation": "--gradient_accumulation_steps 3",
    "lora": "--lora_rank 4 --remat attention+linears",
    "tiles": "--tile_layers True --remat full",
    "groups": "--layers_per_checkpoint 2 --fsdp ''",
    "offload": "--offload both",
    "data": "--sequence_parallel_size SHARED",  # several groups of ranks, each with sequences of its own
}
# The command lines of the programs whose flags are golden.
PROGRAMS = (
    "-m lightseq train", "-m lightseq plan", "-m lightseq verify", "-m lightseq evaluate", "-m lightseq schedule",
    "-m lightseq merge", "llama2/train.py", "llama3/train.py", "-m data_gen synthetic",
    "-m data_gen text", "-m launch.sweep",
)  # fmt: skip


def write_inputs(folder: Path) -> None:
    """Writes the model's config and the documents that every run reads."""
    rng = np.random.default_rng(7)
    documents = [rng.integers(3, VOCABULARY, size).tolist() for size in DOCUMENTS]
    (folder / "data.pkl").write_bytes(pickle.dumps({"input_ids": documents}))
    MODEL.save_pretrained(folder / "model")


def words_of(folder: Path, output: str, *more: str) -> str:
    """Returns the command line of a short run; later words win."""
    return " ".join([
        f"--model_name_or_path {folder}/model --random_init --data_path {folder}/data.pkl",
        f"--output_dir {folder}/{output}",
        f"--model_max_length {LENGTH} --max_steps {STEPS} --learning_rate 1e-2 --save_strategy no",
        *more,
    ])  # fmt: skip


def every_case(world: int) -> list[tuple[str, str]]:
    pairs = [(schedule, variant) for schedule in SCHEDULES[world] for variant in VARIANTS]
    return [pair for pair in pairs if pair != ("usp", "data")]  # which needs four ranks of one sequence


def numbers(world: int, cases: list[tuple[str, str]]) -> dict[str, Any]:
    """Returns losses and gradient norms of (schedule, variant) pairs by `world/schedule/variant`."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder)
        shared = str(world // 2)
        runs = [
            words_of(folder, f"{s}-{v}", f"--schedule {s}", VARIANTS[v].replace("SHARED", shared)) for s, v in cases
        ]
        check_ended(runs, spawn(world, programs, "llama3", runs))
        return {f"{world}/{s}/{v}": numbers_of_run(folder / f"{s}-{v}") for s, v in cases}


def check_ended(runs: list[str], ends: list[list[Ended]]) -> None:
    for rank_ends in ends:
        for words, end in zip(runs, rank_ends, strict=True):
            assert end.status == 0, f"{words}: {end.err}"


def numbers_of_run(output: Path) -> dict[str, list[float]]:
    """Returns losses and gradient norms from metrics.jsonl."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    return {"loss": [line["loss"] for line in steps], "grad_norm": [line["grad_norm"] for line in steps]}


def keys() -> dict[str, Any]:
    """Returns the keys of run.json (with dots where they nest) and of metrics.jsonl, and the default of every flag."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder)
        run = words_of(folder, "out", f"--eval_data_path {folder}/data.pkl --eval_strategy steps --eval_steps 1")
        check_ended([run], spawn(2, programs, "llama3", [run]))
        facts = json.loads((folder / "out/run.json").read_text())
        lines = [json.loads(line) for line in (folder / "out/metrics.jsonl").read_text().splitlines()]
        given = {word[2:] for word in run.split() if word.startswith("--")}
        return {
            "run.json": sorted(nested_keys(facts)),
            "metrics.jsonl": sorted({key for line in lines for key in line}),
            "defaults": {flag: value for flag, value in facts["config"].items() if flag not in given},
        }


def nested_keys(value: Any, above: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield f"{above}{key}"
            yield from nested_keys(inner, f"{above}{key}.")


# Checkpoints that any later program must resume, saved after two steps on two ranks.
CHECKPOINTS = {
    "fsdp": "",
    "ddp": "--fsdp ''",
    "lora": "--lora_rank 4",
    "adamw_8bit": "--optim adamw_8bit --max_grad_norm 0",
    "deepspeed": f"--deepspeed {COMMITTED}/zero2.json",
}
SAVED_STEP = 2


def resumable(folder: Path, output: str, kind: str, *more: str) -> str:
    """Returns the command line of a run whose steps do not depend on --max_steps, with the committed model."""
    model = f"--model_name_or_path {COMMITTED}/model --random_init False"
    return words_of(folder, output, model, f"--lr_scheduler_type constant {CHECKPOINTS[kind]}", *more)


def make_checkpoints() -> None:
    """Writes each checkpoint, and beside it the numbers of a run of three steps that never stopped."""
    place = HERE / "checkpoints"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    write(place / "zero2.json", {"zero_optimization": {"stage": 2}})
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(
        LlamaConfig.from_dict({**MODEL.to_dict(), **sizes, "head_dim": 8, "num_key_value_heads": 2})
    ).save_pretrained(place / "model")
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder)
        for kind in CHECKPOINTS:
            save = f"--max_steps {SAVED_STEP} --save_strategy steps --save_steps {SAVED_STEP}"
            runs = [resumable(folder, kind, kind, save), resumable(folder, f"{kind}-whole", kind)]
            check_ended(runs, spawn(2, programs, "llama3", runs))
            shutil.make_archive(str(place / kind), "gztar", folder / kind, f"checkpoint-{SAVED_STEP}")
            write(place / f"{kind}.json", numbers_of_run(folder / f"{kind}-whole"))


def flags() -> dict[str, list[str]]:
    """Returns the flags that each program's --help names."""
    from forked import run

    found = {}
    with TemporaryDirectory() as name:
        for words in PROGRAMS:
            done = run(f"{words} --help", Path(name))
            assert done.returncode == 0, done.stderr
            found[words] = sorted(set(re.findall(r"(?<![\w-])--[a-zA-Z][\w-]*", done.stdout)))
    return found


def write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("make", "bits", "checkpoints"))
    parser.add_argument("file", nargs="?", type=Path)
    arguments = parser.parse_args()
    if arguments.what == "checkpoints":
        make_checkpoints()
        return
    found = {key: value for world in SCHEDULES for key, value in numbers(world, every_case(world)).items()}
    if arguments.what == "bits":
        exact = {f"{run}/{of}": [x.hex() for x in values] for run, both in found.items() for of, values in both.items()}
        arguments.file.write_text("".join(f"{name} {' '.join(values)}\n" for name, values in exact.items()))
        return
    HERE.mkdir(exist_ok=True)
    lines = ",\n".join(f" {json.dumps(run)}: {json.dumps(values)}" for run, values in found.items())
    (HERE / "numbers.json").write_text(f"{{\n{lines}\n}}\n")
    write(HERE / "keys.json", keys())
    write(HERE / "flags.json", flags())


if __name__ == "__main__":
    main()
