"""Pipes, devices, damaged files, numbers that are too large and a garbled environment are refused in one line each."""

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from cases import slow_except
from programs import captured, programs, refusal
from small import words, write_inputs
from worlds import spawn

from data_gen.__main__ import main as data_gen
from launch import sweep
from lightseq import cli
from lightseq.checkpoint.manifest import find_damage
from lightseq.config.command_line import parse
from lightseq.config.lengths import length_flag
from lightseq.config.train_config import TrainConfig, flag_types
from lightseq.utils.files import open_regular, parse_json, read_bytes, read_json

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_inputs(tmp_path_factory.mktemp("hostile"))
    run = words(folder, "run", "--max_steps 2 --save_steps 1")
    assert [end.status for end in spawn(1, programs, "llama3", [run])[0]] == [0]
    return folder


# ---- one reader ------------------------------------------------------------------------------------------------------


def as_pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def as_device(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def test_only_regular_files_up_to_a_size_are_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for make in (as_pipe, as_device):
        make(path)
        with pytest.raises(OSError, match="not a regular file"):
            open_regular(path)
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)
    path.unlink()
    path.write_bytes(b"12345")
    assert read_bytes(path, 5) == b"12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        read_bytes(path, 4)


@pytest.mark.parametrize("text", [b"[" * 100_000, b"{", b"\xff", b"", b"1" * 5000], ids=lambda x: repr(x[:3]))
def test_invalid_json_is_a_value_error(text: bytes, tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        parse_json(text)
    (tmp_path / "x.json").write_bytes(text)
    with pytest.raises(ValueError):
        read_json(tmp_path / "x.json")


# ---- a run's directory -----------------------------------------------------------------------------------------------


def flipped(path: Path, dice: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    path.write_bytes(content)


def cut(path: Path, dice: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: dice.randrange(path.stat().st_size)])


def resumed(files: Path, output: str) -> Any:
    line = words(files, output, "--max_steps 3 --save_strategy no --step_timeout 60 --resume_from_checkpoint True")
    return spawn(1, programs, "llama3", [line])[0][0]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["pipe", "device", "flipped", "cut"])
def test_each_file_of_a_run_may_be_damaged_or_no_file_and_one_line_says_so(way: str, files: Path) -> None:
    """A checkpoint with such a file is passed over, so the run goes on from the one before."""
    dice = random.Random(way)
    whole = files / "run"
    for path in sorted(path.relative_to(whole) for path in whole.rglob("*") if path.is_file()):
        if path.parts[0] == "checkpoint-1":
            continue
        output = f"{way}-{path}".replace("/", "-")
        copy = shutil.copytree(whole, files / output) / path
        {"pipe": as_pipe, "device": as_device, "flipped": lambda x: flipped(x, dice), "cut": lambda x: cut(x, dice)}[
            way
        ](copy)
        end = resumed(files, output)
        assert "Traceback" not in end.err, (path, end.err)
        assert end.status == 0 or (end.status == 2 and end.err.count("\n") == 1), (path, end)
        if path.parts[0] == "checkpoint-2":
            assert end.status == 0 and f"passed over {files / output}/checkpoint-2: " in end.out, (path, end)


@pytest.mark.parametrize(
    "content",
    slow_except(
        [b"\xff" * 10_000], [b"process 1 on h\xffst\nlaunch \xfe\n", b"qrocess 1 on host\n", b"\xff" * 10_000, b""]
    ),
)
def test_a_damaged_lock_is_read_or_refused_in_one_line(content: bytes, files: Path, tmp_path: Path) -> None:
    output = shutil.copytree(files / "run", tmp_path / "run")
    (output / "lock").write_bytes(content)
    line = words(files, "x", f"--output_dir {output} --max_steps 3 --save_strategy no --resume_from_checkpoint True")
    (end,) = spawn(1, programs, "llama3", [line])[0]
    if content and not content.startswith(b"process "):
        assert end.status == 2 and "has a file lock that no run wrote" in end.err and end.err.count("\n") == 1
    else:
        assert end.status == 0, end.err


# ---- manifests -------------------------------------------------------------------------------------------------------


Edit = Callable[[dict[str, Any]], object]


def without(name: str) -> Edit:
    return lambda content: content["files"].pop(name)


def changed(**fields_of_file: Any) -> Edit:
    return lambda content: content["files"]["config.json"].update(fields_of_file)


def renamed(name: str) -> Edit:
    return lambda content: content["files"].update({name: content["files"].pop("config.json")})


MANIFESTS: dict[str, tuple[Edit, str]] = {
    "no files": (lambda content: content["files"].clear(), "is damaged"),
    "no trainer state": (without("trainer_state.json"), "does not list trainer_state.json"),
    "no weights": (without("model.safetensors"), "does not list model.safetensors"),
    "no config": (without("config.json"), "does not list config.json"),
    "no state": (without("state/.metadata"), "does not list state/.metadata"),
    "no random states": (without("state/random-0.json"), "does not list state/random-0.json"),
    "a length of text": (changed(bytes="12"), "is damaged"),
    "a length that is true": (changed(bytes=True), "is damaged"),
    "a huge length": (changed(bytes=10**40), "is damaged"),
    "a negative length": (changed(bytes=-1), "is damaged"),
    "a hash that is none": (changed(sha256="x"), "is damaged"),
    "a hash of another type": (changed(sha256=1), "is damaged"),
    "one more field": (changed(mode=1), "is damaged"),
    "a list": (lambda content: content.update(files=[]), "is damaged"),
    "another version": (lambda content: content.update(version=2), "is damaged"),
    "an infinite length": (changed(bytes=float("inf")), "is damaged"),
    "outside": (renamed("../config.json"), "lies outside the checkpoint"),
    "outside by a detour": (renamed("state/../../config.json"), "lies outside the checkpoint"),
    "no name": (renamed(""), "lies outside the checkpoint"),
    "absolute": (renamed("/etc/passwd"), "lies outside the checkpoint"),
    "no text": (renamed("\ud800"), "lies outside the checkpoint"),
    "a long name": (renamed("x" * 5000), "does not list config.json"),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_manifest_that_was_changed_is_damage(case: str, files: Path, tmp_path: Path) -> None:
    edit, told = MANIFESTS[case]
    checkpoint = shutil.copytree(files / "run" / "checkpoint-2", tmp_path / "checkpoint-2")
    assert find_damage(checkpoint) is None
    (checkpoint / "README.md").write_text("a user's own file")
    (checkpoint / "results.json").write_text("{}")
    assert find_damage(checkpoint) is None
    content = json.loads((checkpoint / "manifest.json").read_text())
    edit(content)
    (checkpoint / "manifest.json").write_text(json.dumps(content))
    damage = find_damage(checkpoint)
    assert damage is not None and told in damage and "\n" not in damage


def test_a_manifest_that_lists_a_file_twice_is_damaged(files: Path, tmp_path: Path) -> None:
    checkpoint = shutil.copytree(files / "run" / "checkpoint-2", tmp_path / "checkpoint-2")
    text = (checkpoint / "manifest.json").read_text()
    first = text.index('"config.json"')
    entry = text[first : text.index("}", first) + 1]
    (checkpoint / "manifest.json").write_text(text.replace(entry, f"{entry}, {entry}"))
    assert find_damage(checkpoint) == "manifest.json is damaged"


# ---- flags -----------------------------------------------------------------------------------------------------------

LARGE = [str(2**63), str(10**40), "9" * 5000, "-" + "9" * 40]
INTEGERS = [name for name, kind in flag_types().items() if kind is int]


@pytest.mark.parametrize("value", LARGE, ids=lambda text: text[:12])
@pytest.mark.parametrize("name", INTEGERS)
def test_a_whole_number_of_a_run_has_an_upper_bound(name: str, value: str) -> None:
    with pytest.raises(ValueError) as refused:
        parse(["--model_name_or_path", "m", "--data_path", "d", "--output_dir", "o", f"--{name}={value}"], "train")
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400
    assert name in {field.name for field in fields(TrainConfig)}


@pytest.mark.parametrize("text", ["9" * 5000 + "K", "9" * 400 + ".5K", "1e400", "9999999999M", "0." + "0" * 400 + "1K"])
def test_a_length_has_an_upper_bound(text: str) -> None:
    with pytest.raises(Exception, match="tokens") as refused:
        length_flag(text)
    assert type(refused.value).__name__ == "ArgumentTypeError" and len(str(refused.value)) < 400


COMMANDS = (
    *(f"plan --model_name_or_path tiny-llama3 --model_max_length 8K --gpus 8 --{name} {{}}" for name in
      ("gpus", "gpus_per_host", "host_cores", "model_max_length", "gpu_memory")),
    *(f"schedule --schedule zigzag --ranks 2 --{name} {{}}" for name in ("ranks", "head_groups", "ulysses_size")),
    *(f"evaluate --task needle --model_name_or_path m --output_dir {{folder}}/o --{name} {{}}" for name in
      ("trials", "choices", "lengths")),
)  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("value", [str(2**63), str(10**40)])
def test_a_command_refuses_numbers_that_are_too_large(command: str, value: str, tmp_path: Path) -> None:
    if "gpu_memory" in command:
        value = "1e999"
    assert refusal(cli.main, *command.format(value, folder=tmp_path).split()).startswith("error: ")


@pytest.mark.parametrize("name", ["documents", "length", "shortest", "vocab_size", "seed"])
def test_data_gen_refuses_numbers_that_are_too_large(name: str, tmp_path: Path) -> None:
    sizes = f"--documents 1 --length 8 --vocab_size 64 --{name} {10**40}"
    said = refusal(data_gen, *f"synthetic --kind uniform {sizes} --output {tmp_path}/d".split())
    assert str(10**40)[:80] in said and not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("gpus_per_node: 1e300", "gpus_per_node: '1e300' is not a whole number"),
        ("timeout_seconds: inf", "timeout_seconds: 'inf' is not a number"),
        (f"fixed: {{ranks: {10**40}}}", "is not a number of processes"),
    ],
)
def test_sweeps_refuse_numbers_that_are_too_large(line: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(f"{line}\ngrid: {{seed: [1]}}\n")
    assert why in refusal(sweep.main, "--config", path, "--list")


def test_a_pipe_in_the_place_of_a_sweep_does_not_block(tmp_path: Path) -> None:
    as_pipe(tmp_path / "sweep.yaml")
    assert "not a regular file" in refusal(sweep.main, "--config", tmp_path / "sweep.yaml", "--list")


def test_pipes_in_the_place_of_outputs_and_adapters_do_not_block(tmp_path: Path) -> None:
    as_pipe(tmp_path / "out")
    plan = "plan --model_name_or_path tiny-llama3 --model_max_length 8K --gpus 2 --bf16 --remat full"
    plan += " --torch_compile False --offload none"
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 8}')
    as_pipe(tmp_path / "adapter_model.safetensors")
    merge = f"merge --adapter {tmp_path} --output_dir {tmp_path}/merged --model_name_or_path {tmp_path}"
    for command in (f"{plan} --output {tmp_path}/out", merge):
        assert refusal(cli.main, *command.split()).startswith("error: ")


# ---- environment -----------------------------------------------------------------------------------------------------

VARIABLES = {
    "RANK": "x",
    "WORLD_SIZE": "two",
    "LOCAL_RANK": "-1",
    "LOCAL_WORLD_SIZE": "0",
    "MASTER_PORT": "70000",
    "TORCHELASTIC_RESTART_COUNT": "9" * 5000,
    "LIGHTSEQ_ATTEMPT": "1.5",
    "LIGHTSEQ_MEMORY_LIMIT": "nan",
    "LIGHTSEQ_LAUNCH": "a\nb",
}
TOGETHER = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}


@pytest.mark.parametrize("name", [*VARIABLES, "RANK too large", "WORLD_SIZE alone"])
def test_garbage_in_the_environment_is_one_line(name: str, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightseq.distributed.start import init_distributed

    given = {**TOGETHER, **({name: VARIABLES[name]} if name in VARIABLES else {})}
    if name == "RANK too large":
        given["RANK"] = "1"
    if name == "WORLD_SIZE alone":
        given = {"WORLD_SIZE": "2"}
    for variable in (*TOGETHER, "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in given.items():
        monkeypatch.setenv(variable, value)

    def join() -> None:
        with init_distributed(10.0):
            raise AssertionError("joined")

    end = captured(join)
    assert end.status == 2 and end.err.startswith(f"error: {name.split()[0]}=") and end.err.count("\n") == 1, end


def test_garbage_in_the_rank_is_one_line_of_each_command(files: Path) -> None:
    environment = {**os.environ, "RANK": "x", "LIGHTSEQ_CACHE_DIR": "~nobody-of-this-name/x"}
    for arguments in (["-m", "lightseq", "no-command"], ["llama3/train.py", "--help"]):
        end = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert end.returncode == 2 and end.stderr.startswith("error: RANK='x' is not a whole number"), end
        assert end.stderr.count("\n") == 1
