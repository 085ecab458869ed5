"""Training runs: steps from `metrics.jsonl`, settings from `run.json`, and summary statistics."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lightseq.config.lengths import format_tokens
from lightseq.utils.files import read_json

from .records import Record, read_each, read_lines

SOFTWARE = {"torch": "torch", "cuda": "CUDA", "transformers": "transformers", "flash-attn-4": "flash-attn-4"}
COMMIT_LETTERS = 10
SMOOTHED_SHARE = 0.05  # of a run's steps, per running mean


@dataclass(frozen=True)
class Run:
    """A run's logged steps and evaluations in order, its run.json, and the summary of rank 0's trace."""

    label: str
    directory: Path
    steps: tuple[Record, ...]
    evaluations: tuple[Record, ...]
    info: Record
    notes: tuple[str, ...]
    profile: Record = field(default_factory=dict)

    def column(self, key: str) -> np.ndarray:
        """Returns one number per logged step; unknown values are NaN."""
        return column(self.steps, key)

    def has(self, key: str) -> bool:
        return bool(np.isfinite(self.column(key)).any())

    @property
    def last_step(self) -> int:
        return int(self.steps[-1]["step"])

    @property
    def is_finished(self) -> bool:
        """Returns whether the run has made all its steps, or stopped early as --early_stopping_patience asks."""
        total = self.info.get("total_steps")
        stopped_early = section(self.info, "ended").get("reason") == "early_stopping"
        return stopped_early or not isinstance(total, int) or self.last_step >= total

    @property
    def steps_before(self) -> int:
        """Number of steps before the first record, such as those before the checkpoint of a resumed run."""
        logged = int(self.steps[0]["step"])
        first = self.info.get("first_step")
        if isinstance(first, int) and first <= logged:
            return first - 1
        # Without first_step, or if the run resumed in its own directory, the file begins before the resumed steps.
        every = section(self.info, "config").get("logging_steps")
        return max(0, logged - every) if isinstance(every, int) else 0

    def unprofiled(self, key: str) -> np.ndarray:
        """Returns a column with NaN for steps that the profiler slows: `--profile_steps` and their neighbors."""
        span = section(self.info, "config").get("profile_steps")
        values = self.column(key)
        if not isinstance(span, list) or len(span) != 2:
            return values
        last = self.column("step")
        first = np.array([self.steps_before, *last[:-1]]) + 1  # a record covers all steps since the previous one
        return np.where((last >= span[0] - 1) & (first <= span[1] + 1), np.nan, values)


# ---- reading --------------------------------------------------------------------------------------------------------


def read_runs(directories: Sequence[Path], notes: list[str]) -> list[Run]:
    """Returns the readable runs and notes the others. Raises ValueError if there are none."""
    named = zip(directories, labels(directories), strict=True)
    return list(read_each(named, lambda pair: read_run(*pair), notes).values())


def labels(directories: Sequence[Path]) -> list[str]:
    """Returns each directory's name, with as many parent directories as make it unique."""
    parts = [path.resolve().parts for path in directories]
    for path, own in zip(directories, parts, strict=True):
        if parts.count(own) > 1:
            raise ValueError(f"{path} is given twice; give each run once")

    def shortest(own: tuple[str, ...]) -> str:
        depths = range(1, len(own) + 1)
        return next("/".join(own[-n:]) for n in depths if sum(other[-n:] == own[-n:] for other in parts) == 1)

    return [shortest(own) for own in parts]


def read_run(directory: Path, label: str) -> Run:
    path = directory / "metrics.jsonl"
    if not path.is_file():
        raise FileNotFoundError(
            f"no metrics.jsonl in {directory}; give the --output_dir of a run, or a command that --help lists"
        )
    notes: list[str] = []
    records = read_lines(path, check_record, notes)
    if not records:
        raise ValueError(f"{path} is empty; the run has logged no step")
    steps, repeated = latest([record for record in records if "eval_loss" not in record])
    evaluations, _ = latest([record for record in records if "eval_loss" in record])
    if not steps:
        raise ValueError(f"{path} has no training step yet; wait for the run's first logged step")
    if repeated:
        notes.append(f"{label}: {repeated} steps were logged twice, as in a resumed run; the later records count")
    info, profile = (read_json_object(directory / name) for name in ("run.json", "profile/summary-rank0.json"))
    return Run(label, directory, steps, evaluations, info, tuple(notes), profile)


def check_record(record: Record) -> Record:
    if type(record.get("step")) is not int:
        raise ValueError('is not a record: it should be an object with a whole number "step"')
    for key, number in record.items():
        if number is not None and not isinstance(number, int | float):
            raise ValueError(f'has {number!r} for "{key}"; it should be a number or null')
        if isinstance(number, int) and abs(number) > sys.float_info.max:
            raise ValueError(f'has a number for "{key}" that is too large')
    return record


def latest(records: Sequence[Record]) -> tuple[tuple[Record, ...], int]:
    """Returns the last record of each step, sorted, and the number of earlier records that were replaced."""
    by_step = {record["step"]: record for record in records}
    return tuple(by_step[step] for step in sorted(by_step)), len(records) - len(by_step)


def read_json_object(path: Path) -> Record:
    """Returns the object in a JSON file, or an empty one if the file does not exist."""
    if not path.is_file():
        return {}
    try:
        value = read_json(path)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); remove it to draw without it") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not a JSON object; remove it to draw without it")
    return value


def column(records: Sequence[Record], key: str) -> np.ndarray:
    return np.array([record.get(key) for record in records], dtype=np.float64)  # None becomes NaN


def section(info: Record, name: str) -> Record:
    """Returns an object inside run.json; empty if it is missing."""
    value = info.get(name)
    return value if isinstance(value, dict) else {}


# ---- settings as text ----------------------------------------------------------------------------------------------

LENGTHS = ("model_max_length", "tokens_per_rank")
DESCRIBED = (
    *("model_name_or_path", "dtype", "fp8", "lora_rank", "model_max_length", "world_size"),
    *("schedule", "kernel", "transport"),
)
# Settings in words; others are their name and value.
PHRASES: Mapping[str, str] = {
    **{"model_name_or_path": "{}", "dtype": "{}", "model_max_length": "{} tokens", "world_size": "{} ranks"},
    **{
        "tokens_per_rank": "{} tokens per rank",
        "per_device_train_batch_size": "batch {}",
        "lora_rank": "LoRA of rank {}",
    },
}
SWITCHES: Mapping[tuple[str, str], str] = {
    **{("fsdp", ""): "DDP", ("fsdp", "full_shard"): "FSDP", ("world_size", "1"): "1 rank"},
    **{("model_name_or_path", "scaled"): "scaled Llama"},
    **{("fused_attention", "True"): "fused attention", ("fused_attention", "False"): "plain attention"},
    **{("dtype", "bf16"): "bfloat16", ("dtype", "fp16"): "float16"},
    **{("torch_compile", "True"): "compiled", ("torch_compile", "False"): "eager"},
}


def settings(info: Record) -> dict[str, str]:
    """Returns a run's flags and automatic choices as strings."""
    known = {**section(info, "config"), **info}
    words = {key: str(value) for key, value in known.items() if isinstance(value, str | int | float) or value is None}
    length, ranks = known.get("model_max_length"), known.get("sequence_ranks")
    if isinstance(ranks, int) and ranks:
        words["tokens_per_rank"] = f"{length / ranks:g}" if isinstance(length, int) else "None"
    if "bf16" in words:
        words["dtype"] = next((d for d in ("bf16", "fp16") if words.get(d) == "True"), "float32")
    return words


def describe(infos: Sequence[Record], without: Sequence[str] = ()) -> str:
    """Describes in one line what runs share: model, dtype, length, machine, and choices that replace flags."""
    known = [settings(info) for info in infos]
    words = []
    for key in DESCRIBED:
        value = shared(each.get(key) for each in known)
        if key == "world_size" and (machine := hardware(infos)):
            words.append(machine)
        elif value not in ("", "None") and key not in without:
            words.append(phrase(key, value))
    return ", ".join(words)


def phrase(key: str, value: str | None) -> str:
    """Returns a setting in words, such as `32K tokens`."""
    if key in LENGTHS and str(value).isdecimal():
        value = format_tokens(int(str(value)))
    form = PHRASES.get(key, f"{key.replace('_', ' ')} {{}}")
    return SWITCHES.get((key, str(value))) or form.format(setting_text(key, value))


def setting_text(name: str, value: object) -> str:
    """Returns a flag's value as text; an empty `--fsdp` means DDP."""
    if name == "fsdp" and value == "":
        return "off (DDP)"
    return {"": '""', "None": "none", "True": "yes", "False": "no"}.get(str(value), str(value))


def shared(values: Iterable[object]) -> str:
    """Returns the value that all have, or an empty string."""
    found = {str(value) if value is not None else "" for value in values}
    return found.pop() if len(found) == 1 else ""


def hardware(infos: Sequence[Record]) -> str:
    """Returns the devices that all runs share, and their number."""
    device = shared(section(info, "hardware").get("device") for info in infos)
    ranks = shared(info.get("world_size") for info in infos)
    if device == "cpu":
        return f"CPU, {ranks} process{'es' if ranks != '1' else ''}" if ranks else "CPU"
    return f"{ranks} × {device}" if ranks and device else device


def versions(infos: Sequence[Record]) -> str:
    """Returns the software versions and the commit that all runs share."""
    found = {name: shared(section(info, "versions").get(key) for info in infos) for key, name in SOFTWARE.items()}
    words = [f"{name} {version}" for name, version in found.items() if version not in ("", "none")]
    commit = shared(info.get("commit") for info in infos)
    return ", ".join([*words, *([f"commit {short_commit(commit)}"] if commit else [])])


def short_commit(commit: str) -> str:
    """Returns the first ten letters of a commit, with `(changed)` if the work tree had changes."""
    letters, _, changed = commit.partition("-")
    return f"{letters[:COMMIT_LETTERS]} ({changed})" if changed else letters[:COMMIT_LETTERS]


# ---- numbers of a run -----------------------------------------------------------------------------------------------


def warmup_records(count: int) -> int:
    """Returns the number of warm-up records: 10%, between 1 and 10."""
    return min(10, max(1, count // 10), count - 1)


def past_warmup(values: np.ndarray) -> np.ndarray:
    """Returns the finite values after the warm-up, or all finite values if there are none."""
    late = values[warmup_records(len(values)) :]
    known = late[np.isfinite(late)]
    return known if known.size else values[np.isfinite(values)]


def median(values: np.ndarray) -> float:
    known = past_warmup(values)
    return float(np.median(known)) if known.size else float("nan")


def smooth(values: np.ndarray) -> np.ndarray:
    """Returns the running mean of finite values, over 5% of the run."""
    half = max(1, round(len(values) * SMOOTHED_SHARE / 2))
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    known = [window[np.isfinite(window)] for window in windows]
    return np.array([window.mean() if window.size else np.nan for window in known])


def peak_memory(run: Run) -> tuple[float, str]:
    """Returns peak bytes and where: `GPU` for the fullest GPU, `host` for a process if there is no GPU."""
    if run.has("peak_memory_allocated_bytes"):
        return highest(run, "peak_memory_allocated_bytes"), "GPU"
    return highest(run, "host_rss_bytes"), "host"


def highest(run: Run, key: str) -> float:
    return float(np.nanmax(run.column(key))) if run.has(key) else float("nan")
