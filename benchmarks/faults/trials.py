"""Each fault: how it is made, what must follow, and how the run goes on until it equals one that nothing befell.

Every function makes one fault, or one run's worth of them, and yields a record of each: what was seen, and what was
lost. What must hold is asserted: a fault that is not survived ends the program.
"""

import contextlib
import ctypes
import os
import random
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.faults import child
from benchmarks.faults.ranks import KILL, RANKS, STEP_TIMEOUT, STOP, Plant, Run, newest, outcome, start, until, words
from lightseq.checkpoint.checkpoints import list_checkpoints
from lightseq.checkpoint.manifest import files_below, find_damage
from lightseq.distributed.watchdog import STATUS

STEPS, SAVE_STEPS = 30, 3
SAVING = f"--save_steps {SAVE_STEPS} --save_total_limit 3"
GO_ON = "--resume_from_checkpoint auto"
SLOW_DISK: Plant = (child.slow_disk, (0.3,))  # a save is under way for several steps
Record = dict[str, Any]


@dataclass
class Bench:
    """Where trials take place, and what an undisturbed run comes to."""

    folder: Path
    dice: random.Random
    undisturbed: tuple[str, list[float]] = ("", [])
    _runs: int = 0

    def output(self) -> Path:
        self._runs += 1
        return self.folder / f"run-{self._runs}"

    def run(self, output: Path, more: str = "", *plants: Plant, **where: Any) -> Run:
        return start(output, words(self.folder, output, STEPS, f"{SAVING} {more}"), plants, **where)

    def finish(self, output: Path, more: str = GO_ON, whole: tuple[str, list[float]] | None = None) -> Run:
        """Goes on to the last step, and compares what came of it with a run that nothing befell."""
        run = self.run(output, more)
        assert run.wait() == [0] * RANKS, run.said
        assert outcome(output, STEPS) == (whole or self.undisturbed), "another result than an undisturbed run's"
        shutil.rmtree(output)
        return run


def undisturbed(bench: Bench, *plants: Plant) -> tuple[str, list[float]]:
    output = bench.output()
    run = bench.run(output, "", *plants)
    assert run.wait() == [0] * RANKS, run.said
    return outcome(output, STEPS)


def ended(run: Run, ranks: range, culprits: tuple[int, ...] = ()) -> list[int | None]:
    """The statuses of ranks that must end by themselves, none of them with 0."""
    statuses = run.wait(ranks)
    assert None not in statuses, f"a rank hung: {statuses}\n{run.said}"
    assert 0 not in statuses, f"a rank took the fault for success: {statuses}\n{run.said}"
    return statuses


def error_of(run: Run) -> str:
    """The line that said what was wrong."""
    lines = [line for line in run.said.splitlines() if line.startswith("error: ")]
    assert lines, f"nothing was said:\n{run.said}"
    return lines[0]


def kill(bench: Bench, kills: int) -> Iterator[Record]:
    """SIGKILL at random moments of a run that is started again each time, every second one while it saves."""
    output, more, count = bench.output(), "", 0
    while count < kills:
        run = bench.run(output, more, *((SLOW_DISK,) if count % 2 else ()))
        further = bench.dice.randrange(1, 9)
        assert until(partial(_has_taken, run, newest(output) + further)), run.said
        if count % 2:
            until(partial(_saves, run), 20.0)
        time.sleep(bench.dice.uniform(0.0, 0.5))
        if not run.alive:
            assert run.wait() == [0] * RANKS, run.said
            assert outcome(output, STEPS) == bench.undisturbed
            output, more = bench.output(), ""
            continue
        rank, step, saving = bench.dice.randrange(RANKS), run.step, run.is_saving
        run.signal(rank, KILL)
        statuses, saved = run.wait(), newest(output)
        assert None not in statuses, f"a rank hung: {statuses}\n{run.said}"
        assert 0 not in statuses or saved == STEPS, f"a rank took the fault for success: {statuses}\n{run.said}"
        count, more = count + 1, GO_ON
        assert all(find_damage(path) is None for path in list_checkpoints(output)), "a checkpoint is not whole"
        yield {"rank": rank, "step": step, "saving": saving, "saved": saved, "statuses": statuses,
               "steps_lost": max(step, run.step) - saved}  # fmt: skip
    bench.finish(output)


def _has_taken(run: Run, step: int) -> bool:
    """Whether a run has come so far, by itself: until it says so, what is there was left by the one before."""
    return not run.alive or (re.search(r"(?m)^step +\d+/", run.said) is not None and run.step >= step)


def _saves(run: Run) -> bool:
    return run.is_saving or not run.alive


def damage(bench: Bench, how: Callable[[Path, random.Random], None], kind: str) -> Iterator[Record]:
    """The newest checkpoint loses part of a file, a bit or a file; the one before is taken, and that is said."""
    output = bench.output()
    run = bench.run(output)
    assert run.wait() == [0] * RANKS, run.said
    newest_one = output / f"checkpoint-{STEPS}"
    name = bench.dice.choice([*files_below(newest_one), "manifest.json"])
    how(newest_one / name, bench.dice)
    said = bench.finish(output).said
    assert f"warning: passed over {newest_one}: " in said, said
    why = re.search(rf"passed over {re.escape(str(newest_one))}: (.*)", said)
    yield {"how": kind, "file": re.sub(r"\d+", "N", name), "said": why[1] if why else "", "steps_lost": SAVE_STEPS}


def truncate(path: Path, dice: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: dice.randrange(len(content))])


def flip(path: Path, dice: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    path.write_bytes(content)


def remove(path: Path, dice: random.Random) -> None:
    path.unlink()


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of few megabytes, or SkipTrial where this process may not mount one."""
    place = folder / "small-disk"
    place.mkdir(exist_ok=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], capture_output=True, text=True
    )
    if done.returncode:
        raise SkipTrial(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


class SkipTrial(Exception):
    """Why a fault cannot be made on this machine."""


def full_disk(bench: Bench) -> Iterator[Record]:
    """The disk fills up during a save: one line, no torn checkpoint; with room again, the run goes on."""
    with small_disk(bench.folder) as place:
        kilobytes = bench.dice.randrange(2600, 5200)
        subprocess.run(["mount", "-o", f"remount,size={kilobytes}k", str(place)], check=True)
        output = place / "run"
        run = bench.run(output, "--save_total_limit 100", SLOW_DISK)
        statuses = ended(run, range(RANKS))
        line = error_of(run)
        assert statuses == [1] * RANKS and "No space left on device" in line and "Traceback" not in run.said, run.said
        assert not list(output.glob("*.partial")) and all(
            find_damage(path) is None for path in list_checkpoints(output)
        )
        lost = run.step - newest(output)
        subprocess.run(["mount", "-o", "remount,size=100m", str(place)], check=True)
        bench.finish(output)
        yield {"kilobytes": kilobytes, "said": line.replace(str(output), "OUTPUT"), "steps_lost": lost}


def short_files(bench: Bench) -> Iterator[Record]:
    """A quota on one rank ends its files early."""
    output, culprit = bench.output(), bench.dice.randrange(RANKS)
    run = bench.run(output, "", (child.short_files, (culprit, 200_000)))
    statuses = ended(run, range(RANKS))
    line = error_of(run)
    assert statuses == [1] * RANKS and "File too large" in line and f"(rank {culprit} on " in line, run.said
    yield {"rank": culprit, "said": line.replace(str(output), "OUTPUT"), "steps_lost": run.step - newest(output)}
    bench.finish(output)


def freeze(bench: Bench) -> Iterator[Record]:
    """SIGSTOP: the others name the rank within the timeout and end, with the stacks of all that can still write."""
    output, culprit = bench.output(), bench.dice.randrange(RANKS)
    run = bench.run(output, "", (child.slow, (0.1,)))
    assert until(lambda: run.step >= 2)
    time.sleep(bench.dice.uniform(0.0, 1.0))
    run.signal(culprit, STOP)
    begin = time.monotonic()
    other = range(1 - culprit, 2 - culprit)
    statuses = ended(run, other)
    seconds = time.monotonic() - begin
    run.end()  # as a launcher does
    assert statuses == [STATUS] and seconds < STEP_TIMEOUT + 10, (statuses, seconds)
    line = error_of(run)
    # Here, without a launcher, rank 0 holds the store in which the others look for a sign of life.
    words = rf"no sign of life from rank {culprit} on \S+ \(step \d+, \w+" if culprit else r"store .*: rank 0 or"
    assert re.search(words, line), line
    stacks = (output / "hang" / f"rank{1 - culprit}.txt").read_text()
    assert "trainer.py" in stacks
    lost = run.step - newest(output)
    yield {"rank": culprit, "seconds": round(seconds, 1), "said": line.split("; where")[0], "steps_lost": lost}
    bench.finish(output)


def failing(bench: Bench) -> Iterator[Record]:
    """A rank raises; every second time while a checkpoint is being written, which is then finished."""
    output, culprit = bench.output(), bench.dice.randrange(RANKS)
    while_saving, at = bench.dice.random() < 0.5, bench.dice.randrange(2, STEPS - 3)
    run = bench.run(output, "", (child.slow, (0.05,)), SLOW_DISK, (child.raises, (culprit, at, while_saving)))
    statuses = ended(run, range(RANKS))
    assert "RuntimeError: planted" in run.logs[culprit].read_text(), run.said
    assert all(find_damage(path) is None for path in list_checkpoints(output))
    lost = run.step - newest(output)
    yield {"rank": culprit, "while_saving": while_saving, "at": at, "statuses": statuses, "steps_lost": lost}
    bench.finish(output)


def corrupt_data(bench: Bench) -> Iterator[Record]:
    """A shard of the data is damaged: refused in one line, or the run ends at the token that cannot be."""
    data, output = bench.folder / "data", bench.output()
    shutil.copytree(data, bench.folder / "good-data")
    name = bench.dice.choice(["tokens.bin", "documents.bin", "meta.json", "ids"])
    try:
        if name == "ids":  # a bit that makes ids which no vocabulary has
            content = bytearray((data / "tokens.bin").read_bytes())
            for _ in range(20):
                content[2 * bench.dice.randrange(len(content) // 2) + 1] ^= 0x80
            (data / "tokens.bin").write_bytes(content)
        else:
            bench.dice.choice([truncate, remove])(data / name, bench.dice)
        run = bench.run(output)
        statuses = ended(run, range(RANKS))
        lines = [line for line in run.said.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1 and "Traceback" not in run.said, run.said
        lost = run.step - newest(output)
    finally:
        shutil.rmtree(data)
        (bench.folder / "good-data").rename(data)
    said = lines[0].replace(str(bench.folder), "FOLDER")
    yield {"how": name, "statuses": statuses, "said": said, "steps_lost": lost}
    bench.finish(output)


def sick_numbers(bench: Bench) -> Iterator[Record]:
    """NaN in one rank's gradient: once, the step is skipped; for good, the run ends, and goes on from before."""
    culprit, at = bench.dice.randrange(RANKS), bench.dice.randrange(5, STEPS - 8)
    output = bench.output()
    run = bench.run(output, "", (child.sick, (culprit, at, at, 20)))
    assert run.wait() == [0] * RANKS, run.said
    named = f"step {at}: the gradient of model.layers.1.mlp.up_proj.weight is not finite; the step was skipped"
    assert named in run.said, run.said
    assert outcome(output, STEPS) == undisturbed(bench, (child.skips, (at,))), "not as if that step had been left out"
    yield {"rank": culprit, "how": "one step", "at": at, "said": named, "steps_lost": 1}
    output = bench.output()
    run = bench.run(output, "--save_total_limit 100", (child.sick, (culprit, at, STEPS, 4)))
    ended(run, range(RANKS))
    line = error_of(run)
    assert f"steps {at} to {at + 3} were skipped" in line, run.said
    whole = [
        path for path in list_checkpoints(output) if int(path.name.split("-")[1]) < at and find_damage(path) is None
    ]
    for later in set(list_checkpoints(output)) - set(whole):
        shutil.rmtree(later)
    yield {"rank": culprit, "how": "for good", "at": at, "said": line, "steps_lost": run.step - newest(output)}
    bench.finish(output)


def two_runs(bench: Bench) -> Iterator[Record]:
    """A second run on the same directory is refused in one line and changes nothing."""
    output = bench.output()
    first = bench.run(output, "", (child.slow, (0.1,)))
    assert until(lambda: first.step >= 1)
    time.sleep(bench.dice.uniform(0.0, 1.0))
    more = bench.dice.choice(["--overwrite_output_dir", GO_ON])
    second = start(output, words(bench.folder, output, STEPS, f"{SAVING} {more}"), name=".second")
    statuses = second.wait()
    assert statuses == [2] * RANKS, second.said
    line = error_of(second)
    assert "is being written to by process" in line
    assert first.wait() == [0] * RANKS and outcome(output, STEPS) == bench.undisturbed
    yield {"flags": more, "said": line.split(" is being")[1], "steps_lost": 0}


def cut_network(bench: Bench) -> Iterator[Record]:
    """Two ranks in network namespaces of their own; the link between them goes down without a word."""
    names = [f"ls{os.getpid() % 10000}x{rank}" for rank in range(RANKS)]
    with namespaces(names):
        output = bench.output()
        where = {"address": "10.77.0.1", "spaces": tuple(names)}
        run = bench.run(output, "", (child.slow, (0.1,)), **where)
        assert until(lambda: run.step >= 3), run.said
        time.sleep(bench.dice.uniform(0.0, 1.0))
        subprocess.run(["ip", "-n", names[0], "link", "set", names[0], "down"], check=True)
        begin = time.monotonic()
        statuses = ended(run, range(RANKS))
        seconds = time.monotonic() - begin
        lines = [line for line in run.said.splitlines() if line.startswith("error: ")]
        assert any("no sign of life from rank" in line or "the store" in line for line in lines), run.said
        lost = run.step - newest(output)
        yield {
            "statuses": statuses,
            "seconds": round(seconds, 1),
            "said": lines[0].split("; where")[0],
            "steps_lost": lost,
        }
    bench.finish(output)


@contextlib.contextmanager
def namespaces(names: list[str]) -> Iterator[None]:
    """Network namespaces joined by one link, named after the spaces that its ends are in."""
    if os.geteuid() or shutil.which("ip") is None:
        raise SkipTrial("network namespaces need root and the program ip")
    commands = [f"netns add {name}" for name in names]
    commands += [f"link add {names[0]} netns {names[0]} type veth peer name {names[1]} netns {names[1]}"]
    for number, name in enumerate(names, 1):
        commands += [f"-n {name} addr add 10.77.0.{number}/24 dev {name}"]
        commands += [f"-n {name} link set {end} up" for end in (name, "lo")]
    try:
        for command in commands:
            done = subprocess.run(["ip", *command.split()], capture_output=True, text=True)
            if done.returncode:
                raise SkipTrial(f"ip {command}: {done.stderr.strip()}")
        yield
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def own_mounts() -> None:
    """What is mounted from here on is seen by this process and its children alone, where that is allowed."""
    if not os.geteuid() and ctypes.CDLL(None).unshare(0x00020000) == 0:  # CLONE_NEWNS
        subprocess.run(["mount", "--make-rprivate", "/"], capture_output=True)
