"""Retrieval over training: `python3 -m analysis needle FILE...` plots records of benchmarks/needle.py."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from lightseq.config.lengths import format_tokens

from .benchmark import Benchmark
from .drawing import COLORS, GREY, new_figure, subtitle
from .records import Record, read_lines
from .run_settings import hardware_and_versions

SETTING = ("length", "hidden_size", "layers")  # must be equal in one picture
KEYS = (*SETTING, "label", "world", "seed", "held_out", "chance", "points", "tokens_per_second", "skipped", "hardware")
RETRIEVES = 0.95


@dataclass(frozen=True)
class Runs:
    """Trainings of one model at one length, those on one rank first."""

    setting: Mapping[str, int]
    runs: Sequence[Record]

    @property
    def title(self) -> str:
        layers, width = self.setting["layers"], self.setting["hidden_size"]
        return f"needles at {format_tokens(self.setting['length'])} tokens, {layers} layers of width {width}"

    @property
    def alone(self) -> list[Record]:
        return [run for run in self.runs if run["world"] == 1]

    def outside(self, run: Record) -> tuple[float, int] | None:
        """Returns the largest distance of a run's accuracy from the band of the runs on one rank, and its step."""
        curves = [accuracy_by_step(one) for one in self.alone]
        distances = []
        for step, accuracy in accuracy_by_step(run).items():
            band = [curve[step] for curve in curves if step in curve]
            if band:
                distances.append((max(accuracy - max(band), min(band) - accuracy, 0.0), step))
        return max(distances, default=None)


# ---- the records ----------------------------------------------------------------------------------------------------


def read_runs(path: Path, notes: list[str]) -> list[Record]:
    return read_lines(path, check_record, notes)


def check_record(record: Record) -> Record:
    if record.get("benchmark") != "needle":
        raise ValueError("is not a record of benchmarks/needle.py")
    if missing := [key for key in KEYS if key not in record]:
        raise ValueError(f"has no {missing[0]!r}; it should be a record of benchmarks/needle.py")
    return record


def group_runs(records: Iterable[Record]) -> list[Runs]:
    """Returns runs by setting. A later record replaces an earlier one of the same label."""
    found: dict[tuple[int, ...], dict[str, Record]] = {}
    for record in records:
        found.setdefault(tuple(record[key] for key in SETTING), {})[record["label"]] = record

    def order(run: Record) -> tuple[int, int]:
        return run["world"], run["seed"]

    return [
        Runs(dict(zip(SETTING, setting, strict=True)), sorted(found[setting].values(), key=order))
        for setting in sorted(found)
    ]


def accuracy_by_step(run: Record) -> dict[int, float]:
    return {point["step"]: point["accuracy"] for point in run["points"]}


def retrieves_from(run: Record) -> int | None:
    """Returns the first step from which on every evaluation retrieves; None if the last does not."""
    first = None
    for step, accuracy in accuracy_by_step(run).items():
        if accuracy < RETRIEVES:
            first = None
        elif first is None:
            first = step
    return first


# ---- the table ------------------------------------------------------------------------------------------------------


def table_rows(group: Runs) -> list[list[str]]:
    rows = [["", f"{RETRIEVES:.0%} from step", "accuracy at the end", "steps", "tokens/s"]]
    for run in group.runs:
        first, points, rate = retrieves_from(run), run["points"], run["tokens_per_second"]
        end = [f"{points[-1]['accuracy']:.1%}", f"{points[-1]['step']}"] if points else ["–", "–"]
        rows.append([run["label"], "–" if first is None else f"{first}", *end, f"{rate:,.0f}" if rate else "–"])
    return rows


def remarks(group: Runs) -> list[str]:
    """Returns the distance of the runs on several ranks from those on one, and reasons for missing points."""
    out = [f"Accuracy on {group.runs[0]['held_out']} held-out documents; chance is {group.runs[0]['chance']:.1%}."]
    for run in group.runs:
        if run["world"] > 1 and (outside := group.outside(run)):
            distance, step = outside
            alone = f"the {len(group.alone)} runs on one rank"
            if distance:
                out.append(f"{run['label']}: up to {100 * distance:.1f} points above or below {alone}, at step {step}.")
            else:
                out.append(f"{run['label']}: always between {alone}.")
    if not any(map(retrieves_from, group.runs)):
        out.append(f"No run reached {RETRIEVES:.0%}.")
    return out + [f"– {run['label']}: {run['skipped']}" for run in group.runs if run["skipped"]]


# ---- the figure -----------------------------------------------------------------------------------------------------


def figure(group: Runs) -> Figure | None:
    """Plots accuracy over steps, a line per run. Runs on several ranks are dashed, above those that they repeat."""
    drawn = [run for run in group.runs if run["points"]]
    if not drawn:
        return None
    out = new_figure(8.5, 5)
    axes = out.subplots()
    for run, color in zip(drawn, COLORS * len(drawn), strict=False):
        curve = accuracy_by_step(run)
        style = "o-" if run["world"] == 1 else "D--"
        axes.plot([*curve], [*curve.values()], style, color=color, markersize=4.5, label=run["label"])
    axes.axhline(drawn[0]["chance"], color=GREY, linewidth=1.2, linestyle=":", label="chance")
    length = format_tokens(group.setting["length"])
    axes.set_title(f"Retrieval of a needle from {length} tokens", loc="left")
    axes.set(xlabel="optimizer steps", ylabel=f"retrieved, % of {drawn[0]['held_out']} held-out documents")
    axes.set_ylim(-0.03, 1.03)
    axes.set_xlim(left=0)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=None))
    axes.legend(loc="best")
    subtitle(out, f"{group.title}; {hardware_and_versions(drawn)}")
    return out


BENCHMARK = Benchmark(
    name="needle",
    title="Retrieval of needles",
    description="Plots retrieval accuracy over training steps",
    read=read_runs,
    group=group_runs,
    figure=figure,
    table_rows=table_rows,
    remarks=remarks,
)
