"""Random command lines and malformed files: each is taken, or refused in one line; nothing in them is run."""

import contextlib
import dataclasses
import io
import json
import os
import pickle
import random
import resource
import shutil
import signal
import struct
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from huggingface_hub import constants
from transformers import LlamaForCausalLM

import llama2
from benchmarks.faults import ranks
from benchmarks.faults.ranks import CONFIG, LENGTH, VOCABULARY, free_port, processes, until
from benchmarks.records import append
from lightseq.checkpoint import manifest, state_files
from lightseq.checkpoint.checkpoints import STATE, TRAINER_STATE, read_trainer_state
from lightseq.checkpoint.tensor_index import read_index
from lightseq.config.checks import CHOICES
from lightseq.config.train_config import TrainConfig
from lightseq.data.batches import open_examples
from lightseq.distributed.mesh import World
from lightseq.models import weights
from lightseq.models.family import resolve
from lightseq.training import train as training
from lightseq.training.command import main as train

if TYPE_CHECKING:
    from benchmarks.faults.trials import Bench, Record

CANARY = "ran"  # the file that code in an input would leave
NAMES = ["", " ", "..", "../..", "/dev/null", "/proc/self/mem", "a b", "$(touch ran)", "`touch ran`", "; touch ran",
         "--bf16", "-", "✓", "x" * 300, "%s%n", "{0.__class__}", "None", "nan", "0", "\n"]  # fmt: skip
NUMBERS = ["0", "1", "2", "3", "-1", "7", "0.5", "1e-3", "1e30", "nan", "inf", "-inf", "x", "", "0x10", "1_0", "²"]
LENGTHS = ["1", "2", "3", "17", "48", "49", "512", "0", "-5", "48.0", "x"]
OBJECTS = ["{}", "[]", "{", '{"rope_type": "linear", "factor": 4}', '{"rope_type": "yarn"}', '{"type": 3}', "null",
           '{"rope_type": "llama3", "factor": 8}', '{"rope_type": "linear", "factor": "4"}', "[" * 5000]  # fmt: skip
# What would take a minute each: compilers, models of billions; and timeouts that end the program that tries them.
LEFT_OUT = {"torch_compile": ["False", "no"], "optim": ["adamw_torch", "adamw_torch_fused", "sgd", "adam"],
            "step_timeout": ["60", "0", "-1", "nan", "inf", "x"], "num_train_epochs": NUMBERS,
            "max_steps": ["1", "2", "0", "-3", "x", "1.5"], "model_max_length": LENGTHS,
            "gradient_accumulation_steps": ["1", "2", "0", "-1", "x"],
            "per_device_train_batch_size": ["1", "3", "0", "-1", "x"],
            "per_device_eval_batch_size": ["1", "3", "0", "-1", "x"]}  # fmt: skip


def command(dice: random.Random, folder: Path) -> list[str]:
    """Returns flags at random, some of whose values make sense; a run of two steps at most, where they all do."""
    paths = [str(folder / name) for name in ("data", "data.pkl", "hostile.pkl", "text.jsonl", "model", "gone", CANARY)]
    outputs = [str(folder / "outputs" / name) for name in ("one", "two words", "$(touch ran)", "done")]
    words = ["--model_name_or_path", f"{folder}/model", "--random_init", "--data_path", f"{folder}/data"]
    words += ["--output_dir", outputs[0], "--overwrite_output_dir", "--max_steps", "2", "--model_max_length", "48"]
    kinds = {field.name: str(field.type) for field in dataclasses.fields(TrainConfig)}
    for name in dice.sample(sorted(kinds), dice.choice([1, 1, 2, 2, 3, 4, 6])):
        if name in LEFT_OUT:
            values = LEFT_OUT[name]
        elif name in CHOICES:
            values = [*CHOICES[name], *CHOICES[name], "nonsense", ""]
        elif name == "output_dir":
            values = [*outputs, str(folder / "data.pkl"), "", "/proc/no", "x" * 300]
        elif name.endswith(("path", "checkpoint", "tokenizer", "deepspeed")):
            values = [*paths, *NAMES, "byte", "True", "auto", str(folder / "outputs" / "done" / "checkpoint-2")]
        elif "bool" in kinds[name]:
            values = ["True", "False", "yes", "maybe", ""]
        elif "dict" in kinds[name]:
            values = OBJECTS
        elif "tuple" in kinds[name]:
            values = ["1:2", "2:1", "0:0", "1:", "x", "1:99999999999"]
        else:
            values = NUMBERS if "int" in kinds[name] or "float" in kinds[name] else NAMES
        words += [f"--{name}", dice.choice(values)]
    if dice.random() < 0.1:
        words.insert(dice.randrange(len(words)), dice.choice(NAMES))
    return words


@contextlib.contextmanager
def seeds(bench: "Bench", name: str) -> Iterator[Path]:
    """Yields a folder of well-formed inputs, a finished run, and a file that asks to run a command."""
    folder = bench.folder / name
    folder.mkdir()
    ranks.write_inputs(folder)
    (folder / "data.pkl").write_bytes(pickle.dumps({"input_ids": [list(range(20)), list(range(1, 30))]}))
    (folder / "hostile.pkl").write_bytes(hostile(folder))
    (folder / "text.jsonl").write_text('{"text": "some words"}\n{"text": "and others"}\n')
    with contextlib.suppress(ImportError):
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"text": ["some words", "and others", None]}), folder / "text.parquet")
    torch.manual_seed(0)
    LlamaForCausalLM(CONFIG).save_pretrained(folder / "weights", max_shard_size="100KB")
    done = folder / "outputs" / "done"
    run = ranks.start(done, ranks.words(folder, done, 2, "--save_steps 1"))
    assert run.wait() == [0, 0], run.printed
    yield folder
    assert not (folder / CANARY).exists(), "an input was run"
    shutil.rmtree(folder)


def hostile(folder: Path) -> bytes:
    class Hostile:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch '{folder / CANARY}'",)

    return pickle.dumps({"input_ids": Hostile()})


# ---- command lines ---------------------------------------------------------------------------------------------------


def flags(bench: "Bench", count: int) -> Iterator["Record"]:
    """Tries command lines on two ranks, fifty in a world."""
    seen: Counter[str] = Counter()
    with seeds(bench, "fuzz") as folder:
        for begin in range(0, count, 50):
            commands = [command(bench.dice, folder) for _ in range(min(50, count - begin))]
            seen.update(f"status {status}" for status in try_commands(folder, commands))
    yield {"count": count, "statuses": dict(seen)}


def try_commands(folder: Path, commands: list[list[str]]) -> list[int]:
    """Returns the status of each. Raises AssertionError for a traceback, a hang or the end of a process."""
    results = folder / "results.jsonl"
    results.unlink(missing_ok=True)
    arguments = (free_port(), str(folder), commands)
    world = [processes.Process(target=one_rank, args=(rank, *arguments), daemon=True) for rank in range(2)]
    for process in world:
        process.start()
    until(lambda: not any(process.is_alive() for process in world), 20.0 * len(commands))
    ended = [json.loads(line) for line in results.read_text().splitlines()] if results.is_file() else []
    hung = any(process.is_alive() for process in world)
    for process in world:
        process.kill()
    assert len(ended) == len(commands), f"{'a hang' if hung else 'the end of a process'} at {commands[len(ended)]}"
    for words, (status, printed) in zip(commands, ended, strict=True):
        one_line = printed.startswith("error: ") and printed.count("\n") == 1
        assert "Traceback" not in printed and (status == 0 or one_line), f"{words}: status {status}, {printed}"
    return [status for status, _ in ended]


def one_rank(rank: int, port: int, folder: str, commands: list[list[str]]) -> None:
    torch.set_num_threads(1)
    constants.HF_HUB_OFFLINE = True  # the hub's client has read the environment
    (Path(folder) / "cwd").mkdir(exist_ok=True)
    os.chdir(Path(folder) / "cwd")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    world = World(rank, 2, rank, 2, torch.device("cpu"))
    training.init_distributed = lambda timeout_seconds: contextlib.nullcontext(world)  # type: ignore
    for words in commands:
        printed, status = io.StringIO(), 0
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(io.StringIO()):
            try:
                train(llama2.FAMILY, words)
            except SystemExit as end:
                status = int(end.code or 0)
            except BaseException:
                status = 1
                traceback.print_exc()
        both: list[Any] = [None, None]
        dist.all_gather_object(both, (status, printed.getvalue()))
        if rank == 0:
            ended = max(status for status, _ in both), "".join(text for _, text in both)
            append(Path(folder) / "results.jsonl", ended)
    os._exit(0)  # nothing is left to say to the other rank, which may be gone


# ---- files -----------------------------------------------------------------------------------------------------------


def read_data(path: Path) -> None:
    examples = open_examples(path, LENGTH, VOCABULARY + 300, "byte", lazy=False, progress=False)
    for index in range(len(examples)):
        examples[index]


def read_manifest(path: Path) -> None:
    if (complaint := manifest.find_damage(path)) is not None:
        raise ValueError(complaint)


def read_weights(path: Path) -> None:
    weights.load_or_refuse(LlamaForCausalLM(CONFIG), path, "--model_name_or_path")


def read_random_state(path: Path) -> None:
    state_files.restore_rng(path / STATE / "random-0.json", torch.device("cpu"))


# File of a well-formed input, and what reads the input: the first part of the path.
READERS: dict[str, Callable[[Path], object]] = {
    "data/tokens.bin": read_data,
    "data/documents.bin": read_data,
    "data/meta.json": read_data,
    "data.pkl": read_data,
    "text.jsonl": read_data,
    "text.parquet": read_data,
    "weights/config.json": lambda path: resolve(llama2.FAMILY, str(path), True),
    "weights/model.safetensors.index.json": read_weights,
    "weights/model-00001-of-00004.safetensors": read_weights,
    f"checkpoint/{TRAINER_STATE}": read_trainer_state,
    "checkpoint/manifest.json": read_manifest,
    f"checkpoint/{STATE}/.metadata": lambda path: read_index(path / STATE),
    f"checkpoint/{STATE}/random-0.json": read_random_state,
}


def malformed(content: bytes, dice: random.Random, folder: Path) -> bytes:
    """Returns a file as a bad disk, a broken program or somebody with intent would leave it."""
    made = bytearray(content)
    way = dice.choice(
        ["cut", "flip", "flip", "noise", "repeat", "number", "number", "word", "hostile", "empty", "nest"]
    )
    at = dice.randrange(len(made) or 1)
    if way == "cut":
        return bytes(made[:at])
    if way == "flip":
        for _ in range(dice.choice([1, 2, 8, 64])):
            made[dice.randrange(len(made))] ^= 1 << dice.randrange(8)
    if way == "noise":
        made[at : at + dice.choice([1, 4, 64])] = dice.randbytes(dice.choice([1, 4, 64]))
    if way == "repeat":
        made[at:at] = made[: dice.randrange(len(made) or 1)]
    if way == "number":  # the number that is there becomes another
        numbers = [b"-1", b"0", b"1e400", b"NaN", b"99999999999999999999", b"null", b"[]", b'"x"', b"2.5", b"true"]
        digits = [i for i, byte in enumerate(made) if 48 <= byte <= 57]
        place = dice.choice(digits or [at])
        made[place : place + 1] = dice.choice([*numbers, struct.pack("<q", dice.choice([-1, 1 << 40, (1 << 63) - 1]))])
    if way == "word":
        made = made.replace(dice.choice([b":", b",", b'"', b"text", b"model"]), dice.choice([b"", b"../", b"\0", b"{"]))
    if way == "hostile":
        return hostile(folder)
    if way == "nest":
        return dice.choice([b"[", b'{"a":', b"(", b"\x80\x04("]) * dice.choice([10, 20_000])
    return b"" if way == "empty" else bytes(made)


def try_file(dice: random.Random, good: Path, folder: Path) -> tuple[str, str]:
    """Reads one malformed file. Returns its kind, and the line that refused it or "" if it was taken."""
    kind = dice.choice([kind for kind in READERS if (good / kind).is_file()])
    source = kind.split("/")[0]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    if (good / source).is_dir():
        shutil.copytree(good / source, folder / source)
    (folder / kind).write_bytes(malformed((good / kind).read_bytes(), dice, good))
    try:
        READERS[kind](folder / source)
    except (ValueError, OSError) as refusal:  # what `on_all_ranks` says in one line
        assert str(refusal), f"{kind}: refused without a word"
        return kind, " ".join(str(refusal).split())
    return kind, ""


def files(bench: "Bench", count: int) -> Iterator["Record"]:
    """Reads malformed files, a hundred in a process whose memory is bounded."""
    taken: dict[str, list[int]] = {}
    with seeds(bench, "files") as folder:
        shutil.copytree(folder / "outputs" / "done" / "checkpoint-2", folder / "checkpoint")
        results = folder / "results.jsonl"
        for begin in range(0, count, 100):
            results.unlink(missing_ok=True)
            number = min(100, count - begin)
            process = processes.Process(target=read_some, args=(bench.dice.random(), folder, number), daemon=True)
            process.start()
            process.join(5.0 * number)
            lines = [json.loads(line) for line in results.read_text().splitlines()]
            assert process.exitcode == 0 and len(lines) == number, f"{process.exitcode}: {lines[-1] if lines else None}"
            for kind, refusal in lines:
                taken.setdefault(kind, [0, 0])[bool(refusal)] += 1
    for kind, (took, refused) in sorted(taken.items()):
        yield {"count": took + refused, "file": kind, "taken": took, "refused": refused}


def read_some(seed: float, folder: Path, count: int) -> None:
    def too_long(*_: object) -> None:
        raise TimeoutError("a file that is read for ever")

    signal.signal(signal.SIGALRM, too_long)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30), used + (4 << 30)))
    dice = random.Random(seed)
    np.seterr(all="ignore")
    for _ in range(count):
        signal.alarm(20)
        try:
            found: Any = try_file(dice, folder, folder / "malformed")
        except BaseException:
            append(folder / "results.jsonl", traceback.format_exc())
            shutil.copytree(folder / "malformed", "/tmp/malformed", dirs_exist_ok=True)
            os._exit(3)
        signal.alarm(0)
        append(folder / "results.jsonl", found)
    os._exit(0)
