"""Plot of the largest models that fit: `python3 -m analysis largest FILE...` reads benchmarks/largest.py records."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightseq.config.lengths import format_tokens

from .benchmark import Benchmark
from .drawing import (
    COLORS,
    GIB,
    GREY,
    colors,
    log2_axis,
    new_figure,
    subtitle,
)
from .records import Record, read_lines
from .run_settings import hardware_and_versions

SEARCHED = {"weights": "weights only", "training": "training steps"}
STRATEGIES = {"all": "all dimensions grow", "n_layers": "only layers grow"}
BILLION = 1e9
SEARCH_KEYS = ("what", "strategy", "tokens", "flags", "gpus", "gpu_memory")
KEYS = {
    "largest": ("largest", "parameters", "peak_bytes", "too_large", "too_many_parameters", "reason"),
    "largest-probe": ("length", "fits", "peak_bytes"),
}


@dataclass(frozen=True)
class Limits:
    """Finished searches on one kind of device, and the probes of unfinished searches."""

    setting: Mapping[str, str]  # the device
    found: tuple[Record, ...]
    unfinished: tuple[tuple[Record, ...], ...]

    @property
    def title(self) -> str:
        return self.setting["device"]


# ---- the records ----------------------------------------------------------------------------------------------------


def read_searches(path: Path, notes: list[str]) -> list[Record]:
    return read_lines(path, check_record, notes)


def check_record(record: Record) -> Record:
    kind = record.get("benchmark")
    if kind not in KEYS or not isinstance(record.get("hardware"), dict):
        raise ValueError("is not a record of benchmarks/largest.py")
    if missing := [key for key in (*SEARCH_KEYS, *KEYS[kind]) if key not in record]:
        raise ValueError(f"has no {missing[0]!r}; it should be a record of benchmarks/largest.py")
    return record


def limits_of(records: Iterable[Record]) -> list[Limits]:
    """Returns searches by device. The last result of a repeated search counts."""
    searches: dict[str, dict[tuple[str, ...], list[Record]]] = {}
    for record in records:
        device = str(record["hardware"].get("device", "unknown device"))
        search = tuple(str(record[key]) for key in SEARCH_KEYS)
        searches.setdefault(device, {}).setdefault(search, []).append(record)
    out = []
    for device, mine in searches.items():
        ends = [[r for r in records if r["benchmark"] == "largest"] for records in mine.values()]
        unfinished = tuple(tuple(records) for records, end in zip(mine.values(), ends, strict=True) if not end)
        found = sorted((end[-1] for end in ends if end), key=lambda r: (r["what"] != "weights", name(r), r["gpus"]))
        out.append(Limits({"device": device}, tuple(found), unfinished))
    return out


def name(record: Record) -> str:
    """Returns the settings of a search except the number of GPUs."""
    words = [SEARCHED.get(record["what"], str(record["what"]))]
    words += [STRATEGIES.get(record["strategy"], str(record["strategy"]))]
    words += [f"{format_tokens(record['tokens'])} tokens"] if record["tokens"] else []
    words += [f"{record['gpu_memory']:g} GiB per GPU"] if record["gpu_memory"] else []
    words += [record["flags"]] if record["flags"] else []
    return ", ".join(words)


def gpus(record: Record) -> str:
    return f"{record['gpus']} GPU{'s' if record['gpus'] > 1 else ''}"


def too_large(record: Record) -> float:
    """Returns the smallest size that did not fit, in billions of parameters, or the largest tried size."""
    return (record["too_many_parameters"] or record["parameters"]) / BILLION


# ---- the table ------------------------------------------------------------------------------------------------------


def table_rows(limits: Limits) -> list[list[str]]:
    rows = [["largest model that fits", "GPUs", "scale", "parameters", "GiB per GPU", "too large"]]
    for r in limits.found:
        peak = f"{r['peak_bytes'] / GIB:.1f}" if r["peak_bytes"] else ""
        above = f"{r['too_many_parameters']:,}" if r["too_many_parameters"] else ""
        rows.append([name(r), str(r["gpus"]), str(r["largest"]), f"{r['parameters']:,}", peak, above])
    return rows


def remarks(limits: Limits) -> list[str]:
    """Returns why larger sizes did not fit, and the progress of unfinished searches."""
    reasons = dict.fromkeys(str(r["reason"]) for r in limits.found if r["too_large"])
    out = [f"Reasons for not fitting: {'; '.join(reasons)}."] if reasons else []
    for probes in limits.unfinished:
        fits = max((r for r in probes if r["fits"]), key=lambda r: r["length"], default=None)
        result = f"scale {fits['length']} fits" if fits else "no tried scale fits"
        size = f" in {fits['peak_bytes'] / GIB:.1f} GiB per GPU" if fits and fits["peak_bytes"] else ""
        out.append(f"{name(probes[0])}, {gpus(probes[0])}: search unfinished; {result}{size} so far.")
    return out


# ---- the figure -----------------------------------------------------------------------------------------------------


def figure(limits: Limits) -> Figure | None:
    """Plots parameters by number of GPUs, or a bar per search if all used the same number."""
    found = limits.found
    if not found:
        return None
    over_gpus = len({r["gpus"] for r in found}) > 1
    out = new_figure(9, 5 if over_gpus else 1.5 + 0.9 * len(found))
    axes = out.subplots()
    if over_gpus:
        draw_lines(axes, found)
        out.legend(loc="outside lower left")
    else:
        draw_bars(axes, found)
    axes.set_title("The largest model that fits", loc="left")
    subtitle(out, hardware_and_versions([{**r, "world_size": r["gpus"]} for r in found]))
    return out


def draw_lines(axes: Axes, found: Sequence[Record]) -> None:
    """Plots a line per search. Error bars reach up to the smallest size that did not fit."""
    names = list(dict.fromkeys(map(name, found)))
    for label, color in zip(names, colors(len(names)), strict=True):
        mine = [r for r in found if name(r) == label]
        sizes = [r["parameters"] / BILLION for r in mine]
        above = [too_large(r) - size for r, size in zip(mine, sizes, strict=True)]
        x = [r["gpus"] for r in mine]
        axes.errorbar(x, sizes, yerr=([0] * len(sizes), above), color=color, marker="o", capsize=4, label=label)
    counts = sorted({r["gpus"] for r in found})
    log2_axis(axes, counts, [str(count) for count in counts])
    axes.set(xlabel="GPUs", ylabel="parameters, billions\n(error bar: too large)")
    axes.set_ylim(bottom=0)


def draw_bars(axes: Axes, found: Sequence[Record]) -> None:
    """Plots sizes that fit, and in a pale color the next sizes, which did not fit."""
    for place, r in enumerate(found):
        size = r["parameters"] / BILLION
        axes.barh(place, too_large(r), 0.6, color=COLORS[0], alpha=0.25)
        axes.barh(place, size, 0.6, color=COLORS[0])
        peak = f"\n{r['peak_bytes'] / GIB:.0f} GiB per GPU" if r["peak_bytes"] else ""
        beside = {"xytext": (6, 0), "textcoords": "offset points", "va": "center", "fontsize": 9.5, "color": GREY}
        axes.annotate(f"{size:,.3g} billion{peak}", (too_large(r), place), **beside)
    axes.set_yticks(range(len(found)), [name(r).replace(", ", "\n") for r in found])
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.set_xlim(0, 1.2 * axes.dataLim.x1)  # leaves room for the text beside the longest bar
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("parameters, billions; pale: up to the size that did not fit")


BENCHMARK = Benchmark(
    name="largest",
    title="The largest model that fits",
    description="Plots the parameters of the largest models that fit",
    read=read_searches,
    group=limits_of,
    figure=figure,
    table_rows=table_rows,
    remarks=remarks,
)
