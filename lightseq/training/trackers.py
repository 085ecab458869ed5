"""Experiment trackers that get every record of a run beside metrics.jsonl, by accelerate's classes."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lightseq.distributed.environment import text_in
from lightseq.utils.formatting import first_line

EVENTS: Final = ".lightseq"  # suffix of our TensorBoard files; other programs write into runs/ too
PROJECT: Final = "lightseq"
# Arguments of each tracker's class for a run that writes into a directory.
ARGUMENTS: Final[Mapping[str, Callable[[Path], dict[str, Any]]]] = {
    "tensorboard": lambda run: {"run_name": "runs", "logging_dir": str(run), "filename_suffix": EVENTS},
    "wandb": lambda run: {"run_name": text_in("WANDB_PROJECT", PROJECT), "name": run.name, "dir": str(run)},
    "mlflow": lambda run: {"experiment_name": text_in("MLFLOW_EXPERIMENT_NAME", PROJECT), "run_name": run.name},
    "trackio": lambda run: {"run_name": text_in("TRACKIO_PROJECT", PROJECT), "name": run.name},
    "comet_ml": lambda run: {"run_name": text_in("COMET_PROJECT_NAME", PROJECT)},
}


@dataclass
class Tracker:
    """One of accelerate's trackers. A record that it cannot take is reported once, and does not end the run."""

    name: str
    tracker: Any
    has_failed: bool = False

    def write(self, record: Mapping[str, Any]) -> None:
        values = {key: value for key, value in record.items() if key != "step" and value is not None}
        try:
            self.tracker.log(values, step=record["step"])
        except Exception as error:  # a server may answer anything
            self._report(error)

    def finish(self) -> None:
        try:
            self.tracker.finish()
        except Exception as error:
            self._report(error)

    def _report(self, error: Exception) -> None:
        if not self.has_failed:
            said = f"warning: --report_to {self.name} failed ({type(error).__name__}: {first_line(error)})"
            print(f"{said}; metrics.jsonl has every record", file=sys.stderr, flush=True)
        self.has_failed = True


def start_tracker(name: str, directory: Path, flags: Mapping[str, Any]) -> Tracker:
    """Starts a tracker of the run in `directory`, and stores its flags, but in TensorBoard.

    Raises ValueError if it cannot start, for example without a key or a server that answers.
    """
    from accelerate import PartialState  # both take seconds to import
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    PartialState()  # accelerate's own log needs it
    try:
        tracker = LOGGER_TYPE_TO_CLASS[name](**ARGUMENTS[name](directory))
        tracker.start()
        if name == "comet_ml":
            tracker.tracker.set_name(directory.name)
        if name != "tensorboard":  # whose flags would be files that nothing here removes
            tracker.store_init_configuration(dict(flags))
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise ValueError(f"--report_to {name} cannot start ({reason}); set it up, or leave it out") from error
    return Tracker(name, tracker)
