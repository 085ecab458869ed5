"""Figures that stand in two places agree: on the README, on the pages, and in the records of benchmarks/results/."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from pages import PAGES, ROOT

from benchmarks.plan_attention import predictions
from lightseq.config.lengths import parse_tokens
from lightseq.plan.rates import CHIPS, attention_rates
from lightseq.schedule.cost import AttentionShape
from lightseq.schedule.timing import RATES

RESULTS, ALL_RESULTS = ROOT / "docs" / "results.md", ROOT / "dev" / "RESULTS.md"
RECORDS = ROOT / "benchmarks" / "results"
MEDIAN = re.compile(r"([\d,]+)\** \[([\d,]+), ([\d,]+)\]")  # of tokens/s, with the lowest and the highest
# Tables of attention by their first heading, and their records.
ATTENTION = {
    "two H100 80 GB": "attention-2xh100-schedules",
    "two H100, window of 4,096 at 128K": "attention-2xh100-window",
    "two H100, other heads": "attention-2xh100-other-heads",
    "four H100 80 GB, 32 and 8 heads of 128": "attention-4xh100",
    "two H200": "attention-2xh200-auto",
    "four H200": "attention-4xh200-auto",
}
PACKED = "packed documents of 1K to 64K tokens (log-normal), 128K in all"
# What a row of these tables measured, by words of its name: implementation, and the schedule that was asked for.
ROWS = {
    "one GPU's kernel": ("single-gpu", ""),
    "Ulysses by NCCL": ("ulysses-fa4", ""),
    "torch context parallel": ("torch-cp", ""),
    "ring-flash-attn": ("ring-flash-attn", ""),
    "--schedule prefix": ("lightseq", "prefix"),
    "--schedule ulysses": ("lightseq", "ulysses"),
    "--schedule auto": ("lightseq", "auto"),
}

Record = dict[str, Any]


@dataclass(frozen=True)
class Table:
    title: str  # of its section
    header: list[str]
    rows: list[list[str]]

    def groups(self) -> Iterator[list[list[str]]]:
        """Yields the rows below each first cell that is not empty: implementations of one run."""
        group: list[list[str]] = []
        for row in self.rows:
            if row[0] and group:
                yield group
                group = []
            group.append(row)
        yield group

    def runs(self) -> Iterator[list[list[str]]]:
        """Yields the groups, or the whole table if its first column names implementations."""
        yield from self.groups() if any(not row[0] for row in self.rows) else [self.rows]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


@cache
def tables() -> tuple[Table, ...]:
    """Returns the tables of the page of results and of the measurements behind it."""
    found = []
    for section in re.split(r"^#+ ", RESULTS.read_text() + ALL_RESULTS.read_text(), flags=re.M):
        for block in re.findall(r"(?:^\|.*\n)+", section, flags=re.M):
            header, _, *rows = block.splitlines()
            found.append(Table(section.splitlines()[0], cells(header), [cells(row) for row in rows]))
    return tuple(found)


def table(title: str, which: int = 0) -> Table:
    return [each for each in tables() if each.title == title][which]


def records(name: str) -> list[Record]:
    return [json.loads(line) for line in (RECORDS / f"{name}.jsonl").open()]


@cache
def step_records() -> dict[tuple[str, ...], list[Record]]:
    """Returns the records of whole steps by median, lowest and highest tokens/s."""
    found: dict[tuple[str, ...], list[Record]] = {}
    for file in (*RECORDS.glob("step-*.jsonl"), *RECORDS.glob("grpo-*.jsonl")):
        for record in filter(lambda each: each.get("tokens_per_second"), records(file.stem)):
            names = ("tokens_per_second", "tokens_per_second_lowest", "tokens_per_second_highest")
            found.setdefault(tuple(f"{record[name]:,.0f}" for name in names), []).append(record)
    return found


def speed(row: list[str]) -> float:
    """Returns the tokens/s of a row, 0 if it ran out of memory."""
    found = MEDIAN.search(" ".join(row))
    return float(found[1].replace(",", "")) if found else 0.0


# ---- whole steps ----------------------------------------------------------------------------------------------------


def test_every_median_with_its_range_is_of_a_record() -> None:
    stated = [
        (page.name, found) for page in PAGES if page.name != "LOG.md" for found in MEDIAN.findall(page.read_text())
    ]
    assert len(stated) > 75 and {"RESULTS.md"} <= {name for name, _ in stated}
    assert not [each for each in stated if each[1] not in step_records()]


def test_the_readme_repeats_rows_of_the_page_of_results() -> None:
    shown = re.findall(r"\| \**([\d,]+)\** \| ([\d.]+ GiB) \|", (ROOT / "README.md").read_text())
    rows = {(f"{speed(row):,.0f}", row[-1].strip("*")) for each in tables() for row in each.rows}
    assert len(shown) == 4 and not {*shown} - rows


def test_memory_mfu_and_time_of_a_row_are_of_its_record() -> None:
    checked = 0
    for row in (row for each in tables() for row in each.rows if speed(row)):
        of = step_records()[MEDIAN.search(" ".join(row)).groups()]  # type: ignore[union-attr]
        for cell in (cell.strip("*") for cell in row):
            if re.fullmatch(r"[\d.]+ GiB", cell):
                assert cell in [f"{each['peak_memory_allocated_bytes'] / 2**30:.1f} GiB" for each in of], row
            elif re.fullmatch(r"[\d.]+%", cell):
                assert cell in [f"{each['mfu']:.1%}" for each in of], row
            elif re.fullmatch(r"\d\.\d{3}( \(two rows\))?", cell):
                assert cell.split()[0] in [f"{each['step_seconds']:.3f}" for each in of], row
            else:
                continue
            checked += 1
    assert checked > 60


def test_whole_steps_on_the_page_are_of_one_run_each() -> None:
    """A row of the page has the fastest other implementation and lightseq of one group of measured rows."""
    runs = [run for each in tables() if each.title != "Whole steps" for run in each.runs()]
    shown = table("Whole steps").rows
    assert len(shown) > 15
    for what, _, other, other_memory, ours, memory, ratio in shown:
        theirs, mine = (float(cell.split()[0].replace(",", "")) for cell in (other, ours))
        assert ratio == f"{mine / theirs:.2f}", what
        (run,) = (run for run in runs if {theirs, mine} <= {speed(row) for row in run})
        rivals = [row for row in run if "lightseq" not in " ".join(row) and "SequenceParallel" not in " ".join(row)]
        assert theirs == max(map(speed, rivals)), what
        assert {other_memory, memory} <= {row[-1].strip("*").removesuffix(" GiB") for row in run}, what


def test_what_was_trained_on_the_page_was_measured() -> None:
    short, long = (each.rows for each in tables() if each.title == "How long")
    measured, model, gpus = set(), "", ""
    for first, second, tokens, flags, result in long:
        model, gpus = first or model, second if first or second else gpus
        measured.add((model.removesuffix(" of rank 16"), gpus, tokens, flags, result))
    for model, gpus, tokens, flags, result in short:
        speed_, memory = result.split(", ")
        assert (model, gpus, tokens, flags, f"trained: {speed_} tokens/s, {memory} GiB") in measured


def test_the_table_of_shared_prefixes_is_of_its_records() -> None:
    names = {"llama3.2-1b": "1B", "qwen3.5-4b": "Qwen3.5-4B"}  # others are Qwen3-4B's shape
    found = [
        x for file in ("1xh200", "2xh200", "4xh200", "qwen3.5-4b-2xh200") for x in records(f"shared-prefix-{file}")
    ]
    assert len(table("Rows that share a prefix").rows) == 13
    model = world = ""
    for where, shape, *shown in table("Rows that share a prefix").rows:
        if where:
            model, world = where.split(",")[0], where.split()[1]
        of = {
            record.get("form", "fit"): record
            for record in found
            if names.get(record["model"], "4B") == model
            and record["world"] == {"one": 1, "two": 2, "four": 4}[world]
            and record["shape"] == shape.replace(" x (", "x").replace(" + ", "+").rstrip(")")
        }
        rows, tree = of["rows"], of["tree"]
        assert shown == [
            f"{rows['seconds']:.2f} s, {rows['peak_memory_allocated_bytes'] / 2**30:.1f} GiB",
            f"**{tree['seconds']:.2f} s**, {tree['peak_memory_allocated_bytes'] / 2**30:.1f} GiB",
            f"{rows['seconds'] / tree['seconds']:.1f} x",
            f"{of['fit']['reached']:.0%}" if "fit" in of else "",
        ]


def test_the_ratios_of_speeds_follow_from_the_tables() -> None:
    def ratio(group: list[list[str]], ours: str = "**lightseq**") -> float:
        """Returns the speed of the last row of lightseq over the fastest of other implementations."""
        mine = [row for row in group if "lightseq" in " ".join(row) or "SequenceParallel" in " ".join(row)]
        chosen = [row for row in mine if ours in row]
        return speed(chosen[-1]) / max(speed(row) for row in group if row not in mine)

    typed = [ratio(group) for which in (0, 1) for group in table("As typed", which).groups()]
    same = ratio(next(table("The same recomputation").groups()), "**lightseq**, `--remat attention`")
    mixture = ratio(next(table("Mixtures of experts").groups()))
    inside = ratio(next(table("As typed", 2).groups()), "**`SequenceParallelSFTTrainer`** (`lightseq-sft`)")
    said = {
        "README.md": [
            f"is {min(typed):.2f} to {max(typed):.2f} times as fast",
            f"and {mixture:.2f} times with a mixture",
        ],
        "docs/results.md": [f"is {same:.2f} times as fast", f"is {min(typed):.2f} to {max(typed):.2f} times as fast"],
        "docs/trainers.md": [f"on two H100 {inside:.2f} times as fast as TRL"],
    }
    for page, claims in said.items():
        text = " ".join((ROOT / page).read_text().replace("**", "").split())
        assert not [claim for claim in claims if claim not in text], page


# ---- attention ------------------------------------------------------------------------------------------------------


def tflops(file: str, label: str, length: int | None = None) -> set[str]:
    """Returns what a row may say: rounded TFLOP/s of its records, the highest of several libraries."""
    asked = next((of for words, of in ROWS.items() if words in label), None)
    found = [r for r in records(file) if r.get("tflops_per_gpu") and length in (None, r["length"])]
    if asked is not None:
        found = [r for r in found if r["implementation"].startswith(asked[0]) and r["request"] == asked[1]]
        if "best" in label or "better" in label:
            found = [max(found, key=lambda r: r["tflops_per_gpu"])]
    return {f"{r['tflops_per_gpu']:.0f}" for r in found}


def shares(file: str) -> set[str]:
    """Returns the TFLOP/s of records as shares of one GPU's kernel for the same heads, window and length."""
    keys = ("heads", "kv_heads", "head_dim", "window", "length")
    found = [r for r in records(file) if r.get("tflops_per_gpu")]
    alone = {
        tuple(r.get(key) for key in keys): r["tflops_per_gpu"] for r in found if r["implementation"] == "single-gpu"
    }
    ratios = [
        r["tflops_per_gpu"] / alone[place] for r in found if (place := tuple(r.get(key) for key in keys)) in alone
    ]
    return {f"{ratio:.0%}" for ratio in ratios}


@pytest.mark.parametrize("header", ATTENTION)
def test_a_table_of_attention_is_of_its_records(header: str) -> None:
    (found,) = (each for each in tables() if each.header[0] == header)
    file, checked = ATTENTION[header], 0
    for label, *values in found.rows:
        for column, value in zip(found.header[1:], (value.strip("*") for value in values), strict=True):
            length = parse_tokens(column, "column") if re.fullmatch(r"\d+K", column) else None
            if value.endswith("%"):
                assert value in shares(file), (label, column)
            elif value.endswith("GiB"):
                assert value in {f"{r.get('peak_memory_bytes', 0) / 2**30:.1f} GiB" for r in records(file)}, (
                    label,
                    column,
                )
            elif value.isdecimal():
                assert value in tflops(file, label, length), (label, column)
            checked += value != "" and not value.startswith("`")
    assert checked >= 9


def test_packed_attention_is_of_its_records() -> None:
    (found,) = (each for each in tables() if each.header[0] == PACKED)
    for label, *values in found.rows:
        for file, value in zip(("packed-2xh200", "packed-4xh200"), values, strict=True):
            assert value.strip("*") in tflops(file, label), (label, file)


def test_shares_of_one_gpus_kernel_follow_from_the_table() -> None:
    (found,) = (each for each in tables() if each.header[0] == "two H100 80 GB")
    rows = {
        row[0]: dict(zip(found.header[1:], (value.strip("*") for value in row[1:]), strict=True)) for row in found.rows
    }
    alone, rival, ours = (
        next(row for label, row in rows.items() if words in label) for words in [*ROWS][:2] + ["prefix"]
    )
    at = {length: f"{int(ours[length]) / int(alone[length]):.0%}" for length in ("32K", "64K")}
    readme, results = (" ".join(path.read_text().split()) for path in (ROOT / "README.md", RESULTS))
    assert f"reaches {at['32K']} of one GPU's own kernel at 32K tokens (K = 1,024), and {at['64K']} at 64K" in readme
    assert f"{at['32K']} of one GPU's kernel at 32K tokens and {at['64K']} at 64K" in results
    assert f"at 8K it is {int(ours['8K']) / int(rival['8K']):.2f} times as fast as Ulysses" in results


@pytest.mark.parametrize(("header", "chip"), [("two H100 80 GB", "h100-80gb"), ("two H200", "h200")])
def test_auto_takes_the_schedule_that_a_table_says(header: str, chip: str) -> None:
    (found,) = (each for each in tables() if each.header[0] == header)
    assert any("`--schedule prefix`, which `auto` takes" in row[0] for row in found.rows)
    rates = {transport: attention_rates(CHIPS[chip], transport) for transport in RATES}
    for length in (parse_tokens(column, "column") for column in found.header[1:]):
        shape = AttentionShape(length, heads=32, kv_heads=8, head_dim=128)
        taken = [r["schedule"] for r in predictions(shape, 8, [2], rates) if r["fastest"]]
        assert taken == ["prefix"], length


# ---- records ----------------------------------------------------------------------------------------------


def test_records_that_pages_name_exist() -> None:
    named = {name for page in (RESULTS, ALL_RESULTS) for name in re.findall(r"[\w.-]+\.jsonl", page.read_text())}
    files = {path.name for path in RECORDS.iterdir()}
    assert len(named) > 30 and named - files == {"metrics.jsonl", "step.jsonl"}
