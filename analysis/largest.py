"""Plot of the largest models that fit: `python3 -m analysis largest FILE...` reads benchmarks/largest.py records."""

from collections.abc import Iterable

import numpy as np
from matplotlib.figure import Figure

from lightseq.config.lengths import format_tokens

from .benchmark import Benchmark, Measurements, group_by
from .drawing import Point, draw_bars, new_figure, subtitle, value_axis
from .output import GIB
from .records import Record
from .runs import hardware, versions

SEARCHED = {"weights": "weights only", "training": "training steps"}
STRATEGIES = {"all": "all dimensions grow", "n_layers": "only layers grow"}
BILLION = 1e9
SEARCH_KEYS = ("what", "strategy", "tokens", "flags", "gpus", "gpu_memory")


class Limits(Measurements):
    """Searches on one kind of device: the result of each finished one, and the probes of unfinished ones."""

    @property
    def title(self) -> str:
        return str(self.setting["device"])

    @property
    def found(self) -> list[Record]:
        """The last result of each search."""
        ends = group_by((r for r in self.records if r["benchmark"] == "largest"), SEARCH_KEYS)
        return sorted((end[-1] for end in ends.values()), key=lambda r: (r["what"] != "weights", name(r), r["gpus"]))

    def table_rows(self) -> list[list[str]]:
        rows = [["largest model that fits", "GPUs", "scale", "parameters", "GiB per GPU", "too large"]]
        for r in self.found:
            peak = f"{r['peak_bytes'] / GIB:.1f}" if r["peak_bytes"] else ""
            above = f"{r['too_many_parameters']:,}" if r["too_many_parameters"] else ""
            rows.append([name(r), str(r["gpus"]), str(r["largest"]), f"{r['parameters']:,}", peak, above])
        return rows

    def remarks(self) -> list[str]:
        """Returns why larger sizes did not fit, and the progress of unfinished searches."""
        reasons = dict.fromkeys(str(r["reason"]) for r in self.found if r["too_large"])
        out = [f"Reasons for not fitting: {'; '.join(reasons)}."] if reasons else []
        for probes in group_by(self.records, SEARCH_KEYS).values():
            if any(r["benchmark"] == "largest" for r in probes):
                continue
            fits = max((r for r in probes if r["fits"]), key=lambda r: r["length"], default=None)
            result = f"scale {fits['length']} fits" if fits else "no tried scale fits"
            size = f" in {fits['peak_bytes'] / GIB:.1f} GiB per GPU" if fits and fits["peak_bytes"] else ""
            out.append(f"{name(probes[0])}, {gpus(probes[0])}: search unfinished; {result}{size} so far.")
        return out

    def figure(self) -> Figure | None:
        """Plots a bar per search: the size that fits, with a whisker up to the next, which did not."""
        found = self.found
        if not found:
            return None
        bars: dict[str, dict[str, Point]] = {}
        for r in found:
            size, above = r["parameters"] / BILLION, (r["too_many_parameters"] or r["parameters"]) / BILLION
            peak = f", {r['peak_bytes'] / GIB:.0f} GiB each" if r["peak_bytes"] else ""
            bars.setdefault(name(r), {})[f"{gpus(r)}{peak}"] = Point("", size, size, above)
        out = new_figure(8.5, 4)
        axes = out.subplots()
        draw_bars(axes, bars, {})
        value_axis(axes, np.array([each.high for points in bars.values() for each in points.values()]), False)
        axes.set(title="The largest model that fits", xlabel="billions of parameters")
        infos = [{**r, "world_size": r["gpus"]} for r in found]
        subtitle(out, hardware(infos), versions(infos), "Whiskers: up to the next size, which did not fit")
        return out


def limits_of(records: Iterable[Record]) -> list[Limits]:
    return [Limits({"device": device}, mine) for (device,), mine in group_by(records, ("device",)).items()]


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


BENCHMARK = Benchmark(
    name="largest",
    title="The largest model that fits",
    program="benchmarks/largest.py",
    keys={
        "largest": (
            *(*SEARCH_KEYS, "hardware", "largest", "parameters", "peak_bytes", "too_large", "too_many_parameters"),
            "reason",
        ),
        "largest-probe": (*SEARCH_KEYS, "hardware", "length", "fits", "peak_bytes"),
    },
    group=limits_of,
)
main = BENCHMARK.main
