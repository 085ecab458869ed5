"""DeepSpeed's files, on disks that may take them on some ranks and not on others.

Inside its `save_checkpoint` ranks wait for each other: one that left it with an error would leave the others there.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROBE_BYTES = 2**20


def save(engine: Any, directory: Path, tag: str) -> None:
    """On every rank. Raises what this one could not write when DeepSpeed has nothing more to do together."""
    failures: list[Exception] = []
    files, scripts = engine.checkpoint_engine, "_copy_recovery_script"
    with _later(files, "makedirs", failures), _later(files, "save", failures), _later(engine, scripts, failures):
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
            failures.append(_cause(failure, [*arguments, *named.values()][-1]))

    setattr(owner, name, attempt)
    try:
        yield
    finally:
        delattr(owner, name)  # its class has the method


def _cause(failure: Exception, path: Any) -> Exception:
    """Why a file was not written, which torch does not say: who writes on in Python is told."""
    if isinstance(failure, OSError):
        return failure
    try:
        with Path(path).open("ab") as file:
            file.write(bytes(PROBE_BYTES))
    except OSError as error:
        return error
    return failure
