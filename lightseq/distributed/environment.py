"""Environment variables that are read or set before torch is imported."""

import atexit
import fcntl
import gc
import hashlib
import os
import platform
import re
import stat
import sys
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final, NoReturn

from lightseq.utils.masking import is_secret_name
from lightseq.utils.process import silence_loggers

# Settings of torch's launcher: seconds that ranks may take to end, and signals to forward.
SHUTDOWN_TIMEOUT, SIGNALS = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "PET_SIGNALS_TO_HANDLE"
LAUNCHER_SETTINGS = {SHUTDOWN_TIMEOUT: "300", SIGNALS: "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"}  # as in launch/
MAX_RESTARTS: Final = "TORCHELASTIC_MAX_RESTARTS"  # set by torch's launcher and by ours
LAUNCHER_SECONDS = 30.0  # the launcher's default
ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # torch's older and newer name

REFUSED: Final = 2  # the status of a command that was given invalid input
MOST_PROCESSES: Final = 2**20
CACHE_FOLDER = "LIGHTSEQ_CACHE_DIR"  # where compiled kernels are cached
CACHE_CONDITIONS = (
    "it must be a folder of yours on a file system with locks, and only you may write to it and to the folders above"
)


def is_main_process() -> bool:
    """Returns whether this process is rank 0, which reports for all ranks. Works before the ranks have connected."""
    return whole_number_in("RANK", 0) == 0


def text_in(variable: str, default: str) -> str:
    """Returns the value of an environment variable, or the default if it is not set or empty."""
    return os.environ.get(variable) or default


def whole_number_in(name: str, default: int, least: int = 0, most: int = MOST_PROCESSES) -> int:
    """Returns a whole number from an environment variable. Exits with status 2 and one line for anything else."""
    text = os.environ.get(name, str(default))
    if not re.fullmatch(r"[0-9]{1,9}", text) or not least <= int(text) <= most:
        refuse_variable(name, f"is not a whole number from {least} to {most:,}")
    return int(text)


def refuse_variable(name: str, problem: str) -> NoReturn:
    """Prints one line about an environment variable and exits with status 2. Works before the ranks have connected."""
    given = f"{name}={os.environ[name]!r:.80}" if name in os.environ else name
    print(f"error: {given} {problem}; unset it, or start with torch.distributed.run", file=sys.stderr, flush=True)
    raise SystemExit(REFUSED)


def ranks_per_host() -> int | None:
    """Returns the processes that the launcher started on this host; None without a launcher."""
    return whole_number_in("LOCAL_WORLD_SIZE", 1, least=1) if "LOCAL_WORLD_SIZE" in os.environ else None


def secrets() -> tuple[str, ...]:
    """Returns the values of environment variables with secret names, which no file may contain."""
    return tuple(value for name, value in os.environ.items() if is_secret_name(name))


def launcher_shutdown_seconds() -> float | None:
    """Returns the seconds after which torch's launcher kills ranks that it has sent a signal to.

    Returns None if torch's launcher did not start this process.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    setting = os.environ.get(SHUTDOWN_TIMEOUT, os.environ.get("PET_SHUTDOWN_TIMEOUT", ""))
    return float(setting) if setting.isdecimal() else LAUNCHER_SECONDS


def launcher_note() -> tuple[str, ...]:
    """Returns a warning, with its remedy, if a signal to torch's launcher would end the run without a checkpoint."""
    patience = launcher_shutdown_seconds()
    if patience is None:
        return ()
    forwarded = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", os.environ.get(SIGNALS, ""))
    missing, why = [], []
    if patience <= LAUNCHER_SECONDS:
        missing.append(SHUTDOWN_TIMEOUT)
        why.append(f"{patience:.0f} s after SIGTERM, saved or not")
    if "SIGUSR1" not in forwarded.split(","):
        missing.append(SIGNALS)
        why.append("at once on SIGUSR1, without a checkpoint")
    remedy = " ".join(f"{name}={LAUNCHER_SETTINGS[name]}" for name in missing)
    warning = f"warning: torch's launcher ends this run {', and '.join(why)}; before starting it, export {remedy}"
    return (warning,) if missing else ()


def set_up_process(expandable_segments: bool = True) -> None:
    """Configures torch and its libraries before they are imported. Only for programs that lightseq starts."""
    silence_loggers()
    atexit.register(gc.freeze)  # skips the last collection, which visits all of torch and transformers for 1 s
    # Waiting threads sleep instead of spinning, which is 20 times as slow on a busy host (dev/LOG.md).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a warning of the store prints fifteen frames of C++
    # Host tensors in 2 MiB pages are allocated faster, and AdamW on the CPU runs 10% faster.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    lock_pages_in_parallel()
    if expandable_segments:
        use_expandable_segments()


def disable_multicast() -> None:
    """Turns off NVLink multicast in symmetric memory, because its failures outlast the process.

    Call it before symmetric memory is allocated.
    """
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")


def lock_pages_in_parallel() -> None:
    """Makes torch page-lock memory with eight threads, in a quarter of the time (dev/LOG.md).

    torch reads the setting at its first page-locked tensor; the user's own setting wins.
    """
    _set_allocator_default("pinned_", "pinned_use_cuda_host_register:True,pinned_num_register_threads:8")


def use_expandable_segments() -> None:
    """Makes torch map GPU memory into one growing range of addresses per stream, where freed neighbours merge.

    Together with `memory/fsdp2.py` it makes steps near the limit of a GPU 5% faster (dev/LOG.md). torch
    reads the setting at its first GPU tensor; the user's own setting wins.
    """
    _set_allocator_default("expandable_segments", "expandable_segments:True")


def has_expandable_segments() -> bool:
    """Returns whether torch maps GPU memory into growing ranges of addresses, by our setting or the user's."""
    return "expandable_segments:True" in os.environ.get(_allocator_variable(), "")


def _allocator_variable() -> str:
    """Returns the environment variable from which torch takes the settings of its allocators."""
    return next((name for name in ALLOCATOR_SETTINGS if name in os.environ), ALLOCATOR_SETTINGS[0])


def _set_allocator_default(prefix: str, setting: str) -> None:
    """Adds a setting to torch's allocators unless the user has given one that begins with `prefix`."""
    name = _allocator_variable()
    given = os.environ.get(name, "")
    if prefix not in given:
        os.environ[name] = f"{given},{setting}" if given else setting


def cache_compiled_kernels() -> None:
    """Caches what torch.compile, Triton and FlashAttention-4 compile on disk for later processes.

    Only this user can write to the folder, because its files are code. Call it before anything is compiled, and before
    FlashAttention-4 is imported; the user's own settings win.
    """
    given = os.environ.get(CACHE_FOLDER)
    # The user may have linked their own folder elsewhere, but in the temp directory a link may be another user's.
    choices = []
    with suppress(RuntimeError, OSError):  # an unknown home directory, or links in a circle
        choices.append(Path(given or "~/.cache/lightseq/kernels").expanduser().resolve())
    if not given:
        choices.append(Path(tempfile.gettempdir()).resolve() / f"lightseq-{os.getuid()}")
    folder = next(filter(_is_usable_cache, choices), None)
    if folder is None:
        if given and is_main_process():
            _warn_unused_cache(given)
        return
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / f"inductor-{_instruction_set()}"))
    os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(folder / "fa4"))
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")


@cache  # once, though every context asks for the cache
def _warn_unused_cache(folder: str) -> None:
    print(f"warning: {CACHE_FOLDER}={folder} is not used: {CACHE_CONDITIONS}", file=sys.stderr)


def _is_usable_cache(folder: Path) -> bool:
    """Makes the folder. Returns whether files in it can be locked, and no other user can write to it or replace it."""
    try:
        for directory in (*reversed(folder.parents), folder):
            with suppress(FileExistsError):
                directory.mkdir(mode=0o700)
        if not _is_ours_alone(folder):
            return False
        with (folder / "lock").open("w") as lock:  # without file locks FlashAttention-4 would hang
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_ours_alone(folder: Path) -> bool:
    """Returns whether no other user can write to the directory or replace it or a directory above."""
    status, above = folder.lstat(), [parent.stat().st_mode for parent in folder.parents]
    ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
    return ours and all(not mode & 0o022 or mode & stat.S_ISVTX for mode in above)


def _instruction_set() -> str:
    """Returns a name for the instruction set of this host's CPU, for which torch.compile builds its C++ code.

    torch's cache does not tell all instruction sets apart, and hosts with different ones may share a home.
    """
    features = platform.machine()
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        features = next((line for line in lines if line.startswith(("flags", "Features"))), features)
    return hashlib.sha256(features.encode()).hexdigest()[:8]


def set_deepspeed_environment(device_type: str, local_rank: int) -> None:
    """Sets what DeepSpeed reads from the environment at import: its device and the local rank."""
    os.environ.setdefault("DS_ACCELERATOR", device_type)
    os.environ.setdefault("LOCAL_RANK", str(local_rank))
