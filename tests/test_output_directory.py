"""The directory that a run writes into: what it removes there and what it never does, and who wrote there before it."""

import errno
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from threading import Timer
from typing import Any

import forked
import pytest
from programs import Ended, alone
from small import losses, words, write_inputs

from lightseq.checkpoint.checkpoints import (
    TRAINER_STATE,
    clear_path,
    list_checkpoints,
    prune,
    remove_checkpoints,
    remove_leftovers,
)
from lightseq.checkpoint.manifest import MANIFEST, find_damage
from lightseq.training import train as training
from lightseq.training.metrics import MetricsFile, damaged_lines, read_records, write_run
from lightseq.training.output_directory import check_shared, name_unwritable, remove_run

SAVED = "--max_steps 2 --save_steps 1"
# What other programs and people may have in a directory, below the names that a run uses.
OF_OTHERS = (
    *("notes.txt", "runs/events.out.tfevents.1.host.2.0", "runs/mine/events.out.tfevents.1", "profile/mine.txt"),
    *("hang/mine.txt", "checkpoint-best/model.safetensors", "checkpoint-7/notes.txt", "checkpoint-8.partial/notes.txt"),
    *("checkpoint-9.deleted/notes.txt", "checkpoint-9.broken/notes.txt", "checkpoint-old.partial/state/notes.txt"),
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inputs, and a run of two steps with a checkpoint after each."""
    folder = write_inputs(tmp_path_factory.mktemp("directories"))
    train(words(folder, "whole", SAVED))
    return folder


@pytest.fixture
def run(files: Path, tmp_path: Path) -> Path:
    """A copy of that run."""
    return shutil.copytree(files / "whole", tmp_path / "run")


def train(line: str) -> Ended:
    end = alone(line)
    assert end.status == 0, end.err
    return end


def write_others(directory: Path) -> dict[str, str]:
    for name in OF_OTHERS:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(f"{name}, which no run wrote")
    return of_others(directory)


def of_others(directory: Path) -> dict[str, str]:
    return {name: (directory / name).read_text() for name in OF_OTHERS if (directory / name).exists()}


# ---- what stays ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags", [pytest.param("--resume_from_checkpoint auto", marks=pytest.mark.slow), "--overwrite_output_dir"]
)
def test_a_run_that_begins_anew_removes_nothing_that_no_run_wrote(files: Path, tmp_path: Path, flags: str) -> None:
    before = write_others(tmp_path / "run")
    train(words(files, "run", f"{SAVED} --save_total_limit 1 {flags} --output_dir {tmp_path}/run"))
    assert of_others(tmp_path / "run") == before
    assert (tmp_path / "run" / "checkpoint-2" / MANIFEST).is_file() and not (tmp_path / "run" / "checkpoint-1").exists()


def test_overwriting_is_refused_where_it_would_delete_the_model_that_training_starts_from(
    files: Path, run: Path
) -> None:
    model = run / "checkpoint-2"
    flags = f"--max_steps 1 --overwrite_output_dir --output_dir {run} --model_name_or_path {model}"
    end = alone(words(files, "run", flags))
    assert end.status == 2 and "whose checkpoints --overwrite_output_dir deletes; give another" in end.err
    assert find_damage(model) is None


def test_a_checkpoint_that_was_moved_and_linked_is_resumed(files: Path, run: Path, tmp_path: Path) -> None:
    (run / "checkpoint-2").rename(tmp_path / "archived")
    (run / "checkpoint-2").symlink_to(tmp_path / "archived")
    train(words(files, "run", f"--max_steps 3 --output_dir {run} --resume_from_checkpoint True"))


def test_auto_keeps_what_an_earlier_run_logged_that_saved_nothing(files: Path, tmp_path: Path) -> None:
    flags = f"--max_steps 1 --save_strategy no --output_dir {tmp_path}/run --resume_from_checkpoint auto"
    train(words(files, "run", flags))
    first = (tmp_path / "run" / "metrics.jsonl").read_text()
    ends = [train(words(files, "run", flags)) for _ in range(2)]
    assert "renamed the existing metrics.jsonl to metrics.jsonl.earlier-2" in ends[1].out
    assert (tmp_path / "run" / "metrics.jsonl.earlier").read_text() == first
    assert json.loads((tmp_path / "run" / "run.json.earlier").read_text())["total_steps"] == 1
    assert json.loads((tmp_path / "run" / "run.json").read_text())["config"]["overwrite_output_dir"] is False


def test_overwriting_removes_what_a_run_wrote_and_keeps_the_files_of_other_programs(run: Path) -> None:
    for name in ("profile/rank0.json.gz", "profile/summary-rank0.json", "hang/rank1.txt", "runs/events.out.tfevents.1"):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text("")
    (run / "runs" / "events.out.tfevents.1.host.2.0.lightseq").write_text("")
    (run / "checkpoint-1").rename(run / "checkpoint-1.broken")
    (run / "checkpoint-3.partial" / "state").mkdir(parents=True)
    (run / "checkpoint-2" / "evaluation").mkdir()
    (run / "checkpoint-2" / "evaluation" / "notes.txt").write_text("mine")
    assert remove_run(run) == ()
    left = sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file())
    assert left == ["checkpoint-2/evaluation/notes.txt", "lock", "runs/events.out.tfevents.1"]


def test_overwriting_keeps_the_metrics_and_the_facts_of_another_program(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"mine": 1}')
    (tmp_path / "metrics.jsonl").write_text('{"epoch": 1}\n')
    assert len(remove_run(tmp_path)) == 2
    assert (tmp_path / "run.json.earlier").read_text() == '{"mine": 1}'
    assert (tmp_path / "metrics.jsonl.earlier").read_text() == '{"epoch": 1}\n'


def test_a_removed_checkpoint_leaves_files_of_other_programs(run: Path) -> None:
    (run / "checkpoint-1" / "state" / "notes.txt").write_text("mine")
    prune(run, 1, False)
    assert [path.name for path in list_checkpoints(run)] == ["checkpoint-1", "checkpoint-2"]
    assert [path.name for path in (run / "checkpoint-1").rglob("*")] == ["state", "notes.txt"]
    prune(run, 1, False)
    assert (run / "checkpoint-1" / "state" / "notes.txt").read_text() == "mine"
    assert find_damage(run / "checkpoint-2") is None


def test_a_checkpoint_that_is_a_link_loses_the_link_alone(run: Path, tmp_path: Path) -> None:
    (run / "checkpoint-1").rename(tmp_path / "archived")
    (run / "checkpoint-1").symlink_to(tmp_path / "archived")
    prune(run, 1, False)
    assert not (run / "checkpoint-1").exists() and find_damage(tmp_path / "archived") is None


def test_save_total_limit_counts_only_the_runs_own_checkpoints(run: Path) -> None:
    other = run / "checkpoint-9"
    other.mkdir()
    (other / TRAINER_STATE).write_text('{"global_step": 9}')  # as transformers' Trainer has it
    prune(run, 1, False)
    names = sorted(path.name for path in run.glob("checkpoint-*"))
    assert names == ["checkpoint-2", "checkpoint-9"] and (other / TRAINER_STATE).is_file()


def test_a_save_sets_aside_a_directory_that_no_run_wrote(tmp_path: Path) -> None:
    for name in ("checkpoint-1", "checkpoint-1.partial"):
        for _ in range(2):
            (tmp_path / name).mkdir()
            (tmp_path / name / "notes.txt").write_text("mine")
            clear_path(tmp_path / name)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"checkpoint-1{end}.other{n}" for end in ("", ".partial") for n in ("", "-2")]
    remove_leftovers(tmp_path, ".partial")
    remove_checkpoints(tmp_path)
    assert len(list(tmp_path.glob("*/notes.txt"))) == 4


def test_a_checkpoint_that_a_user_renamed_is_kept(files: Path, tmp_path: Path) -> None:
    shutil.copytree(files / "whole" / "checkpoint-1", tmp_path / "checkpoint-1.keep")
    remove_checkpoints(tmp_path)
    assert find_damage(tmp_path / "checkpoint-1.keep") is None


def test_a_file_called_lock_that_no_run_wrote_is_not_emptied(files: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").write_text("the combination is 12-34\n")
    end = alone(words(files, "run", f"--max_steps 1 --output_dir {tmp_path}/run"))
    assert end.status == 2 and f"error: --output_dir {tmp_path}/run has a file lock that no run wrote" in end.err
    assert (tmp_path / "run" / "lock").read_text() == "the combination is 12-34\n"


# ---- who came between ------------------------------------------------------------------------------------------------


@pytest.fixture
def meanwhile(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory into which another run saves after a program has looked, and before it holds the lock."""
    take = training.lock_directory

    def late(output_dir: Path, *rest: Any) -> Any:
        shutil.copytree(files / "whole", output_dir, dirs_exist_ok=True)
        monkeypatch.setattr(training, "lock_directory", take)
        return take(output_dir, *rest)

    monkeypatch.setattr(training, "lock_directory", late)
    yield tmp_path / "run"


def test_auto_resumes_from_what_another_run_saved_while_it_waited_for_the_lock(files: Path, meanwhile: Path) -> None:
    end = train(words(files, "run", f"--max_steps 3 --resume_from_checkpoint auto --output_dir {meanwhile}"))
    assert [record["step"] for record in read_records(meanwhile / "metrics.jsonl")] == [1, 2, 3]
    assert "step 3/3" in end.out and "step 1/3" not in end.out, end.out
    assert json.loads((meanwhile / "run.json").read_text())["resumed_from"] == str(meanwhile / "checkpoint-2")
    assert losses(meanwhile.parent, "run")[:2] == losses(files, "whole")


def test_a_new_run_refuses_checkpoints_saved_while_it_waited_for_the_lock(files: Path, meanwhile: Path) -> None:
    end = alone(words(files, "run", f"--max_steps 3 --output_dir {meanwhile}"))
    assert end.status == 2 and "already holds a run" in end.err
    assert len(read_records(meanwhile / "metrics.jsonl")) == 2


# ---- metrics that are damaged ----------------------------------------------------------------------------------------

DAMAGE: dict[str, tuple[bytes, int]] = {
    "garbled": (b'\x00\xff{"step": 1}\n', 1),
    "no object": (b"17\nnull\n[]\n", 3),
    "no step": (b'{"loss": 1.0}\n', 1),
    "a step that is no number": (b'{"step": "1"}\n{"step": true}\n{"step": null}\n', 3),
    "nested too deep": (b"[" * 100_000 + b"\n", 1),
    "cut off": (b'{"step": 1, "lo', 1),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_metrics_lines_are_kept_in_a_file_and_reported(case: str, tmp_path: Path) -> None:
    damage, count = DAMAGE[case]
    path, good = tmp_path / "metrics.jsonl", b'{"step": 1, "loss": 2.0}\n'
    for number in (1, 2):
        path.write_bytes(good + damage)
        metrics = MetricsFile(tmp_path, 1, resumes=True)
        assert (
            len(metrics.notes) == 1
            and f"moved {count} damaged line" in metrics.notes[0]
            and ".damaged" in metrics.notes[0]
        )
        assert path.read_bytes() == good
        assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == (damage.rstrip(b"\n") + b"\n") * number


def test_a_last_record_without_a_line_s_end_is_kept(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}')
    MetricsFile(tmp_path, 1, resumes=True).write({"step": 2, "loss": 1.0})
    assert [record["step"] for record in read_records(tmp_path / "metrics.jsonl")] == [1, 2]
    assert not damaged_lines(tmp_path / "metrics.jsonl")


def test_a_run_goes_on_with_metrics_that_are_damaged_or_missing(files: Path, run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('17\n{"epoch": 3}\nhello')
    flags = f"--save_strategy no --resume_from_checkpoint auto --output_dir {run}"
    end = train(words(files, "run", f"--max_steps 3 {flags}"))
    assert f"warning: {run}/metrics.jsonl: moved 3 damaged lines to metrics.jsonl.damaged" in end.out
    assert [record["step"] for record in read_records(run / "metrics.jsonl")] == [1, 2, 3]
    assert any("metrics.jsonl.damaged" in note for note in json.loads((run / "run.json").read_text())["notes"])
    (run / "metrics.jsonl").unlink()
    end = train(words(files, "run", f"--max_steps 3 {flags}"))
    assert f"warning: {run}/metrics.jsonl is missing; the metrics up to step 2 are lost" in end.out
    assert [record["step"] for record in read_records(run / "metrics.jsonl")] == [3]


def test_a_directory_that_is_not_shared_is_refused_and_a_stale_view_is_waited_for(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=f"--output_dir {tmp_path} is not rank 0's directory; give one on a file system"
    ):
        check_shared(tmp_path, "process 1 on here", seconds=0.0)
    (tmp_path / "lock").write_text("process 7 on elsewhere\n")  # of an earlier run on this host
    with pytest.raises(ValueError, match="is not rank 0's directory"):
        check_shared(tmp_path, "process 1 on here", seconds=0.0)
    Timer(0.2, (tmp_path / "lock").write_text, ["process 1 on here\nlaunch\n"]).start()
    check_shared(tmp_path, "process 1 on here", seconds=60.0)


def test_a_full_disk_is_named_with_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ValueError, match=f"--output_dir {tmp_path} cannot be written .No space left"):
        with name_unwritable(tmp_path):
            write_run(tmp_path, {}, ())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("tool", ["verify", "evaluate --task needle"])
def test_a_tool_says_at_once_why_its_output_directory_cannot_be_made(tool: str, tmp_path: Path) -> None:
    model = "--model_name_or_path tiny-llama3 --random_init --model_max_length 64"
    done = forked.run(f"-m lightseq {tool} {model} --output_dir /proc/nowhere", tmp_path)
    line = "error: --output_dir /proc/nowhere cannot be created (No such file or directory); give another directory"
    assert done.returncode == 2 and done.stderr.splitlines() == [line] and not done.stdout
