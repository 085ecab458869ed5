"""Checkpoints: written beside the training, whole or not at all, found again when the newest are damaged."""

import os
import pickle
import random
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases import slow_except
from programs import Ended, alone, captured, program, programs, run_in
from safetensors import SafetensorError
from small import CONFIG, losses, words, write_inputs
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from worlds import NCCL_WORLDS, gpu_of, one_process, spawn

from lightseq.architecture.flops import total_parameters
from lightseq.checkpoint import checkpoints, manifest, resume, saver, state_files
from lightseq.checkpoint.checkpoints import STATE, TRAINER_STATE, read_trainer_state, remove_leftovers
from lightseq.checkpoint.manifest import MANIFEST, File, find_damage
from lightseq.checkpoint.resume import find_checkpoint
from lightseq.checkpoint.tensor_index import read_index
from lightseq.config.train_config import TrainConfig
from lightseq.distributed.world import World
from lightseq.memory import staging
from lightseq.memory.pinned import CannotPin
from lightseq.models import weight_files
from lightseq.training import journal, saving, trainer
from lightseq.training.optimization import LocalAdamW, LossScaler

SAVED = "--max_steps 4 --save_steps 1"


def train(world: int, *runs: str) -> list[Ended]:
    """Runs training programs one after the other; returns their ends on rank 0."""
    ends = spawn(world, programs, "llama3", list(runs))
    assert [end.status for found in ends for end in found] == [0] * world * len(runs), [end.err for end in ends[0]]
    return ends[0]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inputs, and a run of four steps with four checkpoints."""
    folder = write_inputs(tmp_path_factory.mktemp("checkpoints"))
    train(2, words(folder, "whole", SAVED))
    return folder


# ---- what is damaged is passed over ---------------------------------------------------------------------------------


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


DAMAGE: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "truncated": ("state/__1_0.distcp", cut, "state/__1_0.distcp has "),
    "flipped": ("model.safetensors", flip, "the SHA-256 of model.safetensors differs"),
    "missing": ("state/__0_0.distcp", Path.unlink, "state/__0_0.distcp is missing"),
    "an index cut": ("state/.metadata", cut, "state/.metadata has "),
    "a manifest flipped": (MANIFEST, flip, MANIFEST),
    "no manifest": (MANIFEST, Path.unlink, "manifest.json is missing"),
}


def find_all(rank: int, outputs: list[str]) -> list[tuple[str | None, list[str]]]:
    world = World(rank, dist.get_world_size(), rank, dist.get_world_size(), torch.device("cpu"))
    found = [find_checkpoint(Path(output), "auto", world) for output in outputs]
    return [(f.path.name if f.path else None, [f"{path.name} {why}" for path, why in f.damaged]) for f in found]


def test_each_kind_of_damage_is_said_and_the_newest_whole_checkpoint_is_taken(files: Path, tmp_path: Path) -> None:
    for name, (file, damage, _) in DAMAGE.items():
        shutil.copytree(files / "whole", tmp_path / name)
        for step in (4, 3):
            damage(tmp_path / name / f"checkpoint-{step}" / file)
    outputs = [*(str(tmp_path / name) for name in DAMAGE), str(files / "whole"), str(tmp_path / "nowhere")]
    ranks = spawn(2, find_all, outputs)
    assert ranks[0] == ranks[1]
    for (path, passed_over), (_, _, why) in zip(ranks[0], DAMAGE.values(), strict=False):
        assert path == "checkpoint-2"
        assert [line.split()[0] for line in passed_over] == ["checkpoint-4", "checkpoint-3"]
        assert all(why in line for line in passed_over), passed_over
    assert ranks[0][-2:] == [("checkpoint-4", []), (None, [])]


def with_an_older_view(rank: int, seen: int | None, words: str) -> Ended:
    if rank == 1:
        listed = checkpoints.list_checkpoints
        checkpoints.list_checkpoints = resume.list_checkpoints = lambda folder: listed(folder)[:seen]
    return program(rank, "llama3", words)


@pytest.mark.slow
@pytest.mark.parametrize("seen", [-1, 0], ids=["some", "none"])
def test_hosts_that_see_an_older_list_go_on_from_the_same_checkpoint(files: Path, tmp_path: Path, seen: int) -> None:
    shutil.copytree(files / "whole", tmp_path / "run")
    flags = f"--output_dir {tmp_path}/run --max_steps 5 --save_strategy no --resume_from_checkpoint True"
    ends = spawn(2, with_an_older_view, seen, words(files, "run", flags))
    assert [end.status for end in ends] == [0, 0], ends
    assert len(losses(tmp_path, "run")) == 5


def test_a_checkpoint_that_one_host_does_not_see_is_not_taken_for_damaged(files: Path) -> None:
    line = spawn(2, find_unseen, str(files / "whole"))[1]
    assert "has no checkpoint-4, which rank 0 sees; give a directory on a file system that all hosts share" in line


def find_unseen(rank: int, output: str) -> str:
    world = World(rank, 2, rank, 2, torch.device("cpu"))
    if rank == 1:
        is_dir = Path.is_dir
        Path.is_dir = lambda path: path.name != "checkpoint-4" and is_dir(path)
    return captured(lambda: find_checkpoint(Path(output), "auto", world, visible_seconds=0.0)).err


def test_an_attempt_that_saved_nothing_is_repeated_from_the_checkpoint_that_was_given(
    files: Path, tmp_path: Path
) -> None:
    fresh = f"--output_dir {tmp_path}/fresh --resume_from_checkpoint auto --max_steps 1 --save_strategy no"
    assert [alone(words(files, "fresh", fresh)).status for _ in range(2)] == [0, 0], "auto starts anew"
    given = f"--output_dir {tmp_path}/run --resume_from_checkpoint {files}/whole/checkpoint-2 --max_steps 3"
    for save in ("--save_strategy no", "--save_steps 3"):
        assert alone(words(files, "run", f"{given} {save}")).status == 0
    assert len(losses(tmp_path, "run")) == 1
    end = alone(words(files, "run", given))
    assert end.status == 2 and "already holds a run" in end.err


@pytest.mark.slow
def test_a_run_resumes_from_before_the_damage_and_retains_whole_checkpoints(files: Path, tmp_path: Path) -> None:
    shutil.copytree(files / "whole", tmp_path / "run")
    flip(tmp_path / "run" / "checkpoint-4" / "model.safetensors")
    cut(tmp_path / "run" / "checkpoint-3" / TRAINER_STATE)
    flags = f"{SAVED} --output_dir {tmp_path}/run --save_total_limit 1 --resume_from_checkpoint auto"
    end = train(2, words(files, "run", flags))[0]
    assert "warning: passed over" in end.out and "checkpoint-3: trainer_state.json has" in end.out
    # Damaged ones are no longer counted among those to keep: the limit of one has left the newest whole one.
    found = sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*"))
    assert found == ["checkpoint-3.broken", "checkpoint-4", "checkpoint-4.broken"]
    assert losses(tmp_path, "run") == losses(files, "whole")
    assert find_damage(tmp_path / "run" / "checkpoint-4") is None


def test_auto_does_not_start_over_if_all_checkpoints_are_damaged(files: Path, tmp_path: Path) -> None:
    shutil.copytree(files / "whole" / "checkpoint-4", tmp_path / "run" / "checkpoint-4")
    flip(tmp_path / "run" / "checkpoint-4" / "model.safetensors")
    named = f"--resume_from_checkpoint {tmp_path}/run/checkpoint-4 --output_dir {tmp_path}/other"
    runs = [words(files, "run", f"--output_dir {tmp_path}/run --resume_from_checkpoint auto"), words(files, "x", named)]
    for end in map(alone, runs):
        assert end.status == 2 and end.err.count("\n") == 1, end
        assert "checkpoint-4" in end.err and "the SHA-256 of model.safetensors differs" in end.err


# ---- nothing that a checkpoint says is run, and no name in it leads elsewhere ----------------------------------------


def rewrite(index: Metadata, change: Callable[[Metadata], object]) -> bytes:
    change(index)
    return pickle.dumps(index)


def first_sample(index: Metadata) -> Any:
    return next(iter(index.storage_data.values()))


def first_tensor(index: Metadata) -> Any:
    return index.state_dict_metadata["model.model.embed_tokens.weight"]


def sample(**fields: Any) -> Callable[[Metadata], object]:
    return lambda index: vars(first_sample(index)).update(fields)


def hide_values(index: Metadata) -> None:
    index.storage_data = OrderedDict(index.storage_data)
    index.storage_data.values = {"nothing": 0}  # type: ignore[method-assign, assignment]


def in_a_class(index: Metadata) -> None:
    index.state_dict_metadata = OrderedDict(index.state_dict_metadata)


FORGED: dict[str, tuple[Callable[[Metadata], object], str]] = {
    "places in a dict with values of its own": (hide_values, "OrderedDict"),
    "tensors in a dict of a class": (in_a_class, "OrderedDict"),
    **{
        f"the file {name!r}": (sample(relative_path=name), "names the file")
        for name in ("../secret", "/etc/passwd", "a/b", "..", "a\0b")
    },
    "a name that is no string": (sample(relative_path=["__0_0.distcp"]), "list"),
    "a file that is not there": (sample(relative_path="x"), "names a missing file"),
    "bytes before the file": (sample(offset=-1), "outside the file"),
    "a negative length": (sample(length=-1), "outside the file"),
    "bytes after the file": (sample(length=1 << 40), "outside the file"),
    "an offset that is no number": (sample(offset="0"), "str instead of int"),
    "a transform": (sample(transform_descriptors=["zip"]), "names the file"),
    "a part that is missing": (lambda index: first_tensor(index).chunks.pop(), "do not add up"),
    "a part outside its tensor": (lambda index: setattr(first_tensor(index), "size", torch.Size([3, 5])), "its shape"),
    "a place that is missing": (lambda index: index.storage_data.popitem(), "has no file for the part of"),
    "a tensor that is none": (lambda index: index.state_dict_metadata.update(x=3), "is not a tensor"),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_index_of_tensors_is_one_line(files: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(files / "whole" / "checkpoint-4" / STATE, tmp_path / STATE)
    change, line = FORGED[name]
    forged = rewrite(read_index(tmp_path / STATE), change)
    (tmp_path / STATE / ".metadata").write_bytes(forged)
    with pytest.raises(ValueError, match=line):
        read_index(tmp_path / STATE)


def test_an_index_that_asks_for_an_eighth_of_all_memory_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"\x80\x04\x8e" + (1 << 60).to_bytes(8, "little") + b".")
    with pytest.raises(ValueError, match="is not a tensor index"):
        read_index(tmp_path)


def test_an_index_of_tensors_names_no_link_or_pipe(files: Path, tmp_path: Path) -> None:
    state = tmp_path / STATE
    shutil.copytree(files / "whole" / "checkpoint-4" / STATE, state)
    file = state / first_sample(read_index(state)).relative_path
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="regular file"):
        read_index(state)
    (state / ".metadata").unlink()
    os.mkfifo(state / ".metadata")
    with pytest.raises(ValueError, match="regular file"):
        read_index(state)


def test_an_index_of_tensors_changes_no_class(tmp_path: Path) -> None:
    """BUILD with the state (None, {...}) sets attributes, of a class as of any object."""
    named = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    (tmp_path / ".metadata").write_bytes(named + b"N}S'planted'\nS'yes'\ns\x86b.")
    with pytest.raises(ValueError, match="is not a tensor index: it sets the state of a value that is not an object"):
        read_index(tmp_path)
    assert not hasattr(Metadata, "planted")


def test_a_resume_from_a_forged_checkpoint_is_one_line(files: Path, tmp_path: Path) -> None:
    """Its manifest fits what was forged: a place of a tensor holds another one."""
    checkpoint = tmp_path / "run" / "checkpoint-4"
    shutil.copytree(files / "whole" / "checkpoint-4", checkpoint)

    def swap(index: Metadata) -> None:
        keys = list(index.storage_data)
        for key in keys:
            index.storage_data[key] = index.storage_data[keys[0]]

    (checkpoint / STATE / ".metadata").write_bytes(rewrite(read_index(checkpoint / STATE), swap))
    manifest.write(checkpoint, manifest.describe_all(checkpoint, manifest.files_below(checkpoint)))
    flags = f"{SAVED} --max_steps 5 --output_dir {tmp_path}/run --resume_from_checkpoint auto"
    end = alone(words(files, "run", flags))
    assert end.status == 2 and end.err.count("\n") == 1 and "cannot be read (rank 0" in end.err, end


def test_every_file_of_a_checkpoint_is_in_its_manifest(files: Path) -> None:
    checkpoint = files / "whole" / "checkpoint-4"
    assert sorted(manifest.read(checkpoint)) == manifest.files_below(checkpoint)
    required = {"model.safetensors", "state/.metadata", "state/random-1.json", TRAINER_STATE}
    assert required <= manifest.read(checkpoint).keys()


# ---- writing beside the training -------------------------------------------------------------------------------------


def tensors_saved(output: Path, step: int) -> dict[str, File]:
    """The files that hold tensors; what they are hashed to is a function of the tensors alone."""
    found = manifest.read(output / f"checkpoint-{step}")
    return {name: file for name, file in found.items() if name.endswith((".distcp", ".safetensors"))}


def with_slow_disk(rank: int, runs: list[str]) -> list[Any]:
    """Programs whose files are written once two more steps have been taken, and which say how many there were."""
    write, step, finish, seen = state_files.write, trainer.Trainer.step, staging.Staging.finish, []
    taken = [0]
    staging.SMALL_BYTES = 0  # all is copied beside the training

    def late(self: staging.Staging) -> None:
        begin, until = taken[0], time.monotonic() + 1
        while taken[0] == begin < 11 and time.monotonic() < until:  # a step that did not wait would be in the copies
            time.sleep(0.01)
        finish(self)

    def slow(*args: Any) -> Any:
        begin = taken[0]
        if threading.current_thread().name == "saving":
            while taken[0] < min(begin + 2, 12):  # of both programs
                time.sleep(0.01)
            seen.append(taken[0] - begin)
        return write(*args)

    def counted(self: trainer.Trainer, index: int) -> Any:
        found = step(self, index)
        taken[0] += 1
        return found

    state_files.write, trainer.Trainer.step = slow, counted  # type: ignore[method-assign, assignment]
    staging.Staging.finish = late  # type: ignore[method-assign]
    return [[program(rank, "llama3", run) for run in runs], seen]


def test_the_training_goes_on_while_a_checkpoint_of_before_is_written(files: Path) -> None:
    flags = "--max_steps 6 --save_steps 4"
    runs = [words(files, "inline", f"{flags} --async_save False"), words(files, "beside", flags)]
    (ends, seen), _ = spawn(2, with_slow_disk, runs)
    assert [end.status for end in ends] == [0, 0] and seen[0] >= 1
    for step in (4, 6):
        assert tensors_saved(files / "beside", step) == tensors_saved(files / "inline", step)
    assert losses(files, "beside") == losses(files, "inline")


def in_order(rank: int, run: str) -> list[str]:
    """The steps recorded and saved, in the order in which the training came to them."""
    seen, record = [], journal.Journal.record
    queue_copies, save = saving.Saving.queue_copies, saving.Saving.save

    def recorded(self: journal.Journal, closed: Any) -> None:
        seen.extend([f"record {closed.step}"] if closed is not None else [])
        record(self, closed)

    def queued(self: saving.Saving) -> Any:
        seen.append("copy")
        return queue_copies(self)

    def saved(self: saving.Saving, step: int, *others: Any) -> Path:
        seen.append(f"save {step}")
        return save(self, step, *others)

    journal.Journal.record = recorded  # type: ignore[method-assign]
    saving.Saving.queue_copies, saving.Saving.save = queued, saved  # type: ignore[method-assign]
    assert program(rank, "llama3", run).status == 0
    return seen


def test_copies_are_queued_before_a_step_is_recorded_and_written_after(files: Path) -> None:
    """To read a step's figures the host waits for the device, which would then wait for the copies to begin."""
    (seen,) = spawn(1, in_order, words(files, "order", "--max_steps 5 --save_steps 3"))
    steps = ["record 1", "record 2", "copy", "record 3", "save 3", "record 4", "record 5", "copy", "save 5"]
    assert seen == steps


def with_a_failing_disk(rank: int, failing: str, runs: list[str]) -> list[Ended]:
    """Rank 1 cannot read back what it wrote, or safetensors, which has an error of its own, cannot write on rank 0."""
    describe, save_file = manifest.describe, weight_files.save_file

    def read(path: Path) -> File:
        if rank == 1 and "checkpoint-2" in str(path):
            raise OSError(28, "No space left on device")
        return describe(path)

    def write(tensors: Any, path: Path, **kwargs: Any) -> None:
        if "checkpoint-2" in str(path):
            raise SafetensorError("I/O error: No space left on device (os error 28)")
        save_file(tensors, path, **kwargs)

    if failing == "read":
        manifest.describe = read
    else:
        weight_files.save_file = write
    return programs(rank, "llama3", runs)


DISKS = {
    "read": "[Errno 28] No space left on device (rank 1 on ",
    "write": "I/O error: No space left on device (os error",
}


@pytest.mark.parametrize(
    ("failing", "beside"), slow_except([("read", "True")], [("read", "True"), ("write", "True"), ("read", "False")])
)
def test_a_failed_save_on_one_rank_ends_all_in_one_line_and_harms_no_checkpoint(
    files: Path, failing: str, beside: str
) -> None:
    output = f"failing-{failing}-{beside}"
    flags = f"{SAVED} --async_save {beside} --save_total_limit 1"
    ends = [ranks[0] for ranks in spawn(2, with_a_failing_disk, failing, [words(files, output, flags)])]
    assert [end.status for end in ends] == [1, 1]
    assert ends[0].err.startswith("error: ") and f"checkpoint-2 could not be saved: {DISKS[failing]}" in ends[0].err
    assert ends[0].err.count("\n") == 1 and ends[1].err == ""
    assert [path.name for path in (files / output).glob("checkpoint-*")] == ["checkpoint-1"]
    assert find_damage(files / output / "checkpoint-1") is None


def test_large_states_are_written_to_several_hashed_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_files, "BYTES_FOR_A_THREAD", 4 * 300)
    tensors = {f"model.{i}": torch.randn(100, i + 1) for i in range(7)}
    with one_process():
        hashes = state_files.write(tmp_path, tensors, None)
    parts = sorted(path.stat().st_size for path in tmp_path.glob("*.distcp"))
    assert len(parts) == state_files.THREADS and parts[-1] < 2 * parts[0]
    assert hashes == {path.name: manifest.describe(path).sha256 for path in tmp_path.iterdir()}
    read = dict(state_files.read_full_tensors(tmp_path, "model."))
    assert all(torch.equal(read[name.removeprefix("model.")], tensor) for name, tensor in tensors.items())


def refuse_directory(directory: Path) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("full_for", ["the directory", "one of several files"])
def test_a_full_disk_ends_the_run_in_one_line(files: Path, monkeypatch: pytest.MonkeyPatch, full_for: str) -> None:
    create = state_files._HashingFileSystem.create_stream

    @contextmanager
    def full(self: state_files._HashingFileSystem, path: Path, mode: str) -> Iterator[Any]:
        with create(self, "/dev/full" if "__0_2_" in str(path) else path, mode) as stream:
            yield stream

    if full_for == "the directory":
        monkeypatch.setattr(staging, "SMALL_BYTES", 0)  # the next update waits for the copies
        monkeypatch.setattr(saver, "_empty", refuse_directory)
    else:
        monkeypatch.setattr(state_files, "BYTES_FOR_A_THREAD", 1)
        monkeypatch.setattr(state_files._HashingFileSystem, "create_stream", full)
    end = alone(words(files, f"full for {full_for}".replace(" ", "-"), SAVED))
    assert end.status == 1 and end.err.count("\n") == 1
    assert "checkpoint-1 could not be saved: [Errno 28] No space" in end.err


def test_a_file_that_reads_back_differently_ends_the_run_without_a_checkpoint(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = state_files.write

    def lying(directory: Path, *args: Any) -> Any:
        found = write(directory, *args)
        flip(directory / "__0_0.distcp")
        return found

    monkeypatch.setattr(state_files, "write", lying)
    end = alone(words(files, "lying", SAVED))
    assert end.status == 1 and "state/__0_0.distcp reads back differently from what was written" in end.err
    assert not list((files / "lying").glob("checkpoint-*"))


def test_training_waits_for_saves_on_a_host_without_memory_for_copies(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver, "free_host_memory", lambda world: 1000.0)
    run = words(files, "tight", "--max_steps 2 --save_steps 1")
    end = alone(run)
    assert "training waits while checkpoints are written: copies take" in end.out
    assert find_damage(files / "tight" / "checkpoint-2") is None


def test_memory_for_copies_is_allocated_once_the_optimizer_has_state(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Skips the first updates, as float16 does on overflow; a save may precede the first real one."""
    unscale, prepare, scales, prepared = LossScaler.unscale, saver.CheckpointSaver.prepare, [], []

    def overflows(self: LossScaler, grads: list[Tensor], norm: Tensor) -> tuple[Tensor, bool]:
        scales.append(self.scale)
        return unscale(self, grads, norm * (torch.inf if len(scales) < 3 else 1.0))

    def noted(self: saver.CheckpointSaver, tensors: dict[str, Tensor]) -> str | None:
        prepared.append((len(scales), {name.split(".")[-1] for name in tensors if name.startswith("optimizer.")}))
        return prepare(self, tensors)

    monkeypatch.setattr(LossScaler, "unscale", overflows)
    monkeypatch.setattr(saver.CheckpointSaver, "prepare", noted)
    run = words(files, "overflows", "--fp16 --max_steps 4 --save_steps 1")
    assert alone(run).status == 0
    assert prepared == [(3, {"step", "exp_avg", "exp_avg_sq"})]
    assert find_damage(files / "overflows" / "checkpoint-4") is None


def test_a_run_resumes_from_before_its_first_update(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unscale = LossScaler.unscale
    infinite = lambda self, grads, norm: unscale(self, grads, norm * torch.inf)  # noqa: E731
    monkeypatch.setattr(LossScaler, "unscale", infinite)
    assert alone(words(files, "early", "--fp16 --max_steps 1")).status == 0
    monkeypatch.setattr(LossScaler, "unscale", unscale)
    on = "--fp16 --max_steps 3 --resume_from_checkpoint True"
    end = alone(words(files, "early", on))
    assert end.status == 0 and len(losses(files, "early")) == 3, end.err


# ---- going on elsewhere ----------------------------------------------------------------------------------------------


def draws(rank: int, runs: list[str]) -> list[Any]:
    """Returns what every random generator draws at each step of each program; the last starts from other states."""
    step, drawn = trainer.Trainer.step, []

    def drawing(self: trainer.Trainer, index: int) -> Any:
        drawn[-1].append([torch.rand(()).item(), random.random(), np.random.rand()])
        return step(self, index)

    trainer.Trainer.step = drawing  # type: ignore[method-assign]
    for run in runs:
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(rank + 10 * (run is runs[-1]))
        drawn.append([])
        assert program(rank, "llama3", run).status == 0
    return drawn


@pytest.mark.slow
def test_random_states_resume(files: Path) -> None:
    resumed = "--resume_from_checkpoint auto"
    parts = [("drawn", 4, ""), ("drawn2", 2, ""), ("drawn2", 4, resumed)]
    runs = [words(files, output, f"--max_steps {steps} --save_steps 2 {more}") for output, steps, more in parts]
    ranks = spawn(2, draws, runs)
    assert ranks[0] != ranks[1]
    for whole, _, rest in ranks:
        assert whole[2:] == rest


def one_cannot_lock(rank: int, run: str) -> Ended:
    """A program that resumes, whose second rank finds no more memory to lock for its optimizer's state."""
    step = LocalAdamW.step

    def refused(self: LocalAdamW) -> None:
        if rank == 1:
            raise CannotPin("4,096 bytes of host memory cannot be pinned (CUDA error 2)")
        step(self)

    LocalAdamW.step = refused  # type: ignore[method-assign]
    return program(rank, "llama3", run)


@pytest.mark.slow
def test_a_rank_without_memory_for_its_state_ends_all(files: Path) -> None:
    train(2, words(files, "pinned", "--max_steps 2 --save_steps 1"))
    flags = f"--max_steps 3 --resume_from_checkpoint {files / 'pinned' / 'checkpoint-2'}"
    ends = spawn(2, one_cannot_lock, words(files, "pinned", flags))
    assert [end.status for end in ends] == [2, 2] and "cannot be pinned" in ends[1].err + ends[0].err


def test_an_old_checkpoint_that_cannot_be_removed_is_left_for_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checkpoint-1.deleted" / "held").mkdir(parents=True)
    with monkeypatch.context() as patched:
        patched.setattr(os, "rmdir", lambda *_, **__: (_ for _ in ()).throw(OSError(39, "Directory not empty")))
        remove_leftovers(tmp_path)
    assert (tmp_path / "checkpoint-1.deleted").is_dir()
    remove_leftovers(tmp_path)
    assert not list(tmp_path.iterdir())


OTHERWISE = {
    "one rank": (1, ""),
    "three ranks": (3, ""),
    "four ranks": (4, ""),
    "two sequences": (2, "--sequence_parallel_size 1 --gradient_accumulation_steps 1"),
    "two by two": (4, "--sequence_parallel_size 2 --gradient_accumulation_steps 1"),
    "another schedule": (2, "--schedule ring"),
    "copies": (2, "--fsdp ''"),
}


@pytest.mark.compat
@pytest.mark.parametrize("case", slow_except(["three ranks"], OTHERWISE))
def test_a_run_resumes_on_other_ranks_to_the_same_losses(files: Path, case: str) -> None:
    world, flags = OTHERWISE[case]
    base = "--max_steps 8 --save_steps 4 --gradient_accumulation_steps 2"
    output = f"otherwise-{world}-{len(flags)}"
    train(2, words(files, "as-before", base + " --overwrite_output_dir"))
    checkpoint = files / "as-before" / "checkpoint-4"
    train(world, words(files, output, f"{base} {flags} --resume_from_checkpoint {checkpoint}"))
    assert losses(files, output) == pytest.approx(losses(files, "as-before")[4:], abs=1e-5)
    assert read_trainer_state(files / output / "checkpoint-8")["data"]["places"] == 16


# ---- room on the disk ------------------------------------------------------------------------------------------------


def test_checkpoints_that_will_not_fit_are_refused_or_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, gib = TrainConfig(model_name_or_path="m", data_path="d", output_dir=str(tmp_path)), 2**30
    limited = replace(config, save_total_limit=2)
    monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10 * gib})())
    output = tmp_path / "not" / "yet"
    assert str(checkpoints.check_disk(output, 2 * gib, 5, 0, config)).startswith(
        "a checkpoint takes about 2.0 GiB, 5 of"
    )
    assert "about 100.0 MiB, 3 of them 300.0 MiB; " in str(checkpoints.check_disk(output, 100 << 20, 3, 0, config))
    assert checkpoints.check_disk(output, 11 * gib, 0, 0, config) is None, "nothing will be saved"
    with pytest.raises(ValueError, match=r"takes about 11\.0 GiB, but .* has 10\.0 GiB free; free some space, give"):
        checkpoints.check_disk(output, 11 * gib, 1, 0, config)
    warning = str(checkpoints.check_disk(output, 2 * gib, 6, 0, config))
    assert "2.0 GiB, 6 of them 12.0 GiB; " in warning and "give --save_total_limit" in warning

    def warns(one: int, there: int) -> bool:
        return str(checkpoints.check_disk(output, one * gib, 100, there, limited)).startswith("warning: ")

    assert not warns(3, there=0), "two stay while a third is written"
    assert warns(4, there=0) and not warns(4, there=1), "one of the three is there already"


def test_the_estimated_size_of_a_checkpoint_is_close(files: Path) -> None:
    asked = TrainConfig(model_name_or_path="m", data_path="d", output_dir="o")
    taken = sum(file.bytes for file in manifest.read(files / "whole" / "checkpoint-4").values())
    assert checkpoints.saved_bytes(total_parameters(CONFIG), asked) == pytest.approx(taken, rel=0.1)


def test_saves_are_counted() -> None:
    config = TrainConfig(model_name_or_path="m", data_path="d", output_dir="o", save_steps=4)
    assert [checkpoints.saves_left(config, 0, total, 0.0) for total in (3, 4, 8, 9)] == [1, 1, 2, 3]
    assert checkpoints.saves_left(config, 4, 9, 0.0) == 2 and checkpoints.saves_left(config, 9, 9, 0.0) == 0


# ---- on GPUs ---------------------------------------------------------------------------------------------------------


def on_gpus(rank: int, folder: str, gpu_words: str) -> list[Ended]:
    world = World(rank, dist.get_world_size(), rank, dist.get_world_size(), gpu_of(rank))
    runs = [words(Path(folder), "gpu-beside", gpu_words)]
    runs += [words(Path(folder), "gpu-inline", f"{gpu_words} --async_save False")]
    return [run_in(world, "llama3", run) for run in runs]


@pytest.mark.parametrize("world", NCCL_WORLDS)
@pytest.mark.parametrize("flags", ["", "--optim adamw_torch", "--fsdp ''", "--offload optimizer"])
def test_copies_from_gpus_are_of_the_step_that_was_saved(world: int, flags: str, tmp_path: Path) -> None:
    folder = write_inputs(tmp_path)
    gpu_words = f"--bf16 --deterministic --max_steps 6 --save_steps 2 {flags}"
    assert [end.status for end in spawn(world, on_gpus, str(folder), gpu_words, device="cuda")[0]] == [0, 0]
    for step in (2, 4, 6):
        assert tensors_saved(folder / "gpu-beside", step) == tensors_saved(folder / "gpu-inline", step)
