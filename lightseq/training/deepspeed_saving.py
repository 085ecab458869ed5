"""DeepSpeed's files, on disks that may take them on some ranks and not on others.

Inside its `save_checkpoint` ranks wait for each other: one that left it with an error would leave the others there.
"""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

PROBE_BYTES = 2**20


def save(engine: Any, directory: Path, tag: str) -> None:
    """On every rank. Raises what this one could not write when DeepSpeed has nothing more to do together."""
    failures: list[Exception] = []
    files, scripts = engine.checkpoint_engine, "_copy_recovery_script"
    parts = ((files, "makedirs"), (files, "save"), (engine, scripts), (shutil, "copytree"))
    with ExitStack() as stack:
        for owner, name in parts:
            stack.enter_context(_later(owner, name, failures))
        engine.save_checkpoint(str(directory), tag=tag, save_latest=False)
    if failures:
        raise failures[0]
    if engine.global_rank == 0:
        (directory / "latest").write_text(tag)  # DeepSpeed would write it while the others wait


@contextmanager
def _later(owner: Any, name: str, failures: list[Exception]) -> Iterator[None]:
    """A method that leaves its failure in a list instead of raising it, and does nothing once there is one."""
    method = getattr(owner, name)

    def attempt(*arguments: Any, **named: Any) -> None:
        if failures:
            return
        try:
            method(*arguments, **named)
        except Exception as failure:
            paths = [x for x in (*arguments, *named.values()) if isinstance(x, str | Path)]
            failures.append(_cause(failure, paths[-1]))

    its_own = name in vars(owner)  # or its class's
    setattr(owner, name, attempt)
    try:
        yield
    finally:
        if its_own:
            setattr(owner, name, method)
        else:
            delattr(owner, name)


def _cause(failure: Exception, path: Any) -> Exception:
    """Why a file was not written, which torch does not say: who writes on in Python is told."""
    if isinstance(failure, shutil.Error):  # of several files, each with its reason
        return OSError(failure.args[0][0][-1])
    if isinstance(failure, OSError):
        return failure
    try:
        with Path(path).open("ab") as file:
            file.write(bytes(PROBE_BYTES))
    except OSError as error:
        return error
    return failure
