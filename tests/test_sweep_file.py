"""Reading of sweep files: their cells, refusals, estimates and table."""

import os
from pathlib import Path

import pytest
from rich.console import Console

from launch.sweep_cells import Cell, expand
from launch.sweep_estimate import (
    HOST_FLOPS_PER_SECOND,
    HOST_START_SECONDS,
    START_SECONDS,
    Measured,
    estimate,
    step_flops,
)
from launch.sweep_file import read_sweep
from launch.sweep_records import comparable, pending
from launch.sweep_run import slurm_command
from launch.sweep_table import shown_seconds, table
from lightseq.config.command_line import parse

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = sorted((ROOT / "launch" / "sweeps").glob("*.yaml"))
VOCABULARY = {"llama2": 32000, "llama3": 128256}
FIXED = "model: tiny-llama3, random_init: true, max_steps: 2, data_path: data/any"


def write(directory: Path, text: str) -> Path:
    path = directory / "sweep.yaml"
    path.write_text(text)
    return path


def cells_of(directory: Path, text: str) -> list[Cell]:
    return expand(read_sweep(write(directory, f"fixed: {{{FIXED}}}\n{text}")))


def names(cells: list[Cell]) -> list[str]:
    return [cell.name for cell in cells]


def test_cells_are_the_grid_without_exclude_plus_include(tmp_path: Path) -> None:
    cells = cells_of(
        tmp_path,
        """
grid: {ranks: [1, 2], schedule: [ring, zigzag]}
exclude: [{ranks: 1, schedule: [zigzag, prefix]}]
include: [{ranks: 4, schedule: prefix, kernel: [cpu, reference]}, {ranks: 2, schedule: ring}]
""",
    )
    assert names(cells) == [
        "ranks-1_schedule-ring",
        "ranks-2_schedule-ring",
        "ranks-2_schedule-zigzag",
        "ranks-4_schedule-prefix_kernel-cpu",
        "ranks-4_schedule-prefix_kernel-reference",
    ]
    assert [cell.ranks for cell in cells] == [1, 2, 2, 4, 4]
    assert cells[3].config.kernel == "cpu" and cells[0].config.kernel == "auto"


def test_a_cell_keeps_its_name_when_the_grid_grows(tmp_path: Path) -> None:
    before = names(cells_of(tmp_path, "grid: {model: [meta-llama/Llama-3.2-1B], length: [4K]}"))
    after = names(cells_of(tmp_path, "grid: {model: [meta-llama/Llama-3.2-1B, tiny-llama3], length: [4K, 8K]}"))
    assert before == ["Llama-3.2-1B_length-4096"]
    assert set(before) < set(after)


def test_words_reach_the_flags_as_typed(tmp_path: Path) -> None:
    """In plain YAML `no` is False, 10:12 a number in base 60 and 2e-5 a string."""
    (cell,) = cells_of(
        tmp_path,
        """grid: {save_strategy: no, profile_steps: 10:12, learning_rate: 2e-5, length: 1M, fsdp: "", dtype: bfloat16,
  rope_scaling: '{"rope_type": "linear", "factor": 4}', batch: 2, gradient_checkpointing: False, ranks: 2}""",
    )
    c = cell.config
    assert (c.save_strategy, c.profile_steps, c.learning_rate, c.fsdp) == ("no", (10, 12), 2e-5, "")
    assert (c.model_max_length, c.bf16, c.per_device_train_batch_size) == (2**20, True, 2)
    assert c.rope_scaling == {"rope_type": "linear", "factor": 4} and c.remat_policy == "none"
    assert parse(cell.words, "") == parse([*cell.words], "llama3/train.py")
    assert parse(cell.words, "").output_dir == f"outputs/sweeps/sweep/{cell.name}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("grid: {schedul: [ring]}", "grid.schedul: unknown setting; did you mean schedule?"),
        ("gird: {schedule: [ring]}", "gird: unknown; did you mean grid?; keys are"),
        ("grid: {schedule: [ring], schedule: [zigzag]}", " line 2: schedule is given twice"),
        ("grid: {schedule: [ring}", " line 2: "),
        ("grid: [ring]", "grid: give `setting: value` lines"),
        ("grid: {ranks: 1}\ninclude: [{ranks: 2}, ring]", "include[1]: give `setting: value` lines"),
        ("grid: {schedule: []}", "grid.schedule: give at least one value"),
        ("grid: {schedule: [ring, ring]}", "grid.schedule: ring is listed twice"),
        (
            "grid: {rope_scaling: [{factor: 2}]}",
            "grid.rope_scaling: {'factor': '2'} is not a single value; put JSON in",
        ),
        ("grid: {output_dir: [a]}", "grid.output_dir: every cell gets its own"),
        ("grid: {model: [a-llama3], model_name_or_path: [b]}", "grid.model_name_or_path: model_name_or_path is given"),
        ("grid: {model: [mistral]}", "model: the name mistral does not tell the family; add `family: llama2`"),
        ("grid: {family: [llama4]}", "family: 'llama4' is unknown; choose from llama3, llama2"),
        ("grid: {ranks: [0]}", "ranks: '0' is not a number of processes"),
        ("grid: {dtype: [int8]}", "dtype: 'int8' is unknown; choose from bfloat16"),
        ("grid: {dtype: [float16], bf16: [true]}", "dtype: bf16 or fp16 is given too"),
        ("grid: {schedule: [ringg]}", "schedule-ringg: --schedule 'ringg' is unknown; choose from auto, ring"),
        ("grid: {batch: [0]}", "batch-0: --per_device_train_batch_size 0: give at least 1"),
        ("grid: {length: [4KB]}", "length-4KB: --model_max_length: 4KB is not a number of tokens"),
        ("grid: {ranks: [1]}\nexclude: [{ranks: 2}]", "exclude[0]: matches no cell"),
        ("grid: {ranks: [1]}\nexclude: {ranks: 1}", "exclude: give a list"),
        ("grid: {ranks: [1]}\nexclude: [{ranks: 1}]", "grid: no cell is left"),
        ("", "grid: no cell is left; give settings in grid or include"),
        ("grid: {ranks: 1}\ntimeout_seconds: soon", "timeout_seconds: 'soon' is not a number above 0"),
        ("grid: {ranks: 1}\ndata: {kind: zipf}", "data: documents is missing"),
        ("grid: {ranks: 1}\ndata: {knd: zipf}", "data.knd: unknown; did you mean kind?"),
        ("grid: {tokenizer: [a/b, a-b]}", "tokenizer-a-b: two cells have this name; they differ in tokenizer"),
    ],
)
def test_a_mistake_is_one_line_with_file_and_key(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as refused:
        cells_of(tmp_path, text)
    line = str(refused.value)
    assert line.startswith(f"{tmp_path / 'sweep.yaml'}") and said in line and "\n" not in line


def test_a_list_among_the_fixed_settings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"fixed\.ranks: is the same in every cell"):
        read_sweep(write(tmp_path, "fixed: {ranks: [1, 2]}"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_trainer_takes_every_cell_of_the_shipped_sweeps(path: Path) -> None:
    sweep = read_sweep(path)
    cells = expand(sweep)
    assert len(cells) > 5
    for cell in cells:
        config = parse(cell.words, f"{cell.family}/train.py")
        assert config.output_dir == str(cell.output_dir) and config.random_init and config.max_steps
        assert sweep.data is not None
        assert config.model_max_length <= int(sweep.data["length"]), "a document of the data is a whole sequence"
        assert int(sweep.data["vocab_size"]) <= VOCABULARY[cell.family], "its ids are words of the model"
        slurm_command(sweep, cell)


def test_estimates_come_from_a_like_cell_then_from_the_device(tmp_path: Path) -> None:
    cells = {c.name: c for c in cells_of(tmp_path, "grid: {length: [1K, 4K], ranks: [1, 2], remat: [none, full]}")}
    like, unlike = (cells[f"length-1024_ranks-1_remat-{remat}"] for remat in ("none", "full"))
    work = {cell.name: step_flops(cell) or 0 for cell in cells.values()}
    ran = [Measured(like, work[like.name], 2.0, 5.0), Measured(unlike, work[unlike.name], 99.0, 5.0)]
    for ranks in (1, 2):
        longer = cells[f"length-4096_ranks-{ranks}_remat-none"]
        growth = work[longer.name] / work[like.name] / ranks
        assert 4 < growth * ranks < 16
        assert estimate(longer, ran, None) == pytest.approx(5 + 2 * 2 * growth)

    known, unknown = cells_of(tmp_path, "grid: {model: [llama3.2-1b, ./my-llama3], length: 32K, ranks: 4}")
    flops = 2 * (step_flops(known) or 0)
    assert estimate(known, [], "NVIDIA H100") == pytest.approx(START_SECONDS + flops / 4 / (0.4 * 989e12))
    on_host = HOST_START_SECONDS + flops / HOST_FLOPS_PER_SECOND
    assert estimate(known, [], None) == pytest.approx(on_host), "all ranks share its cores"
    assert estimate(known, [], "an unknown GPU") is None and estimate(unknown, [], "NVIDIA H100") is None


def test_times_are_shown_in_a_readable_unit() -> None:
    shown = [shown_seconds(seconds) for seconds in (12, 5000, 9000, 172_799, 172_800, 7.3e8)]
    assert shown == ["12 s", "83 min", "2.5 h", "48.0 h", "2 days", "8,449 days"]


@pytest.mark.parametrize("width", [80, pytest.param(120, marks=pytest.mark.slow)])
def test_the_table_shows_every_name_whole(width: int) -> None:
    cells = [cell for path in SHIPPED for cell in expand(read_sweep(path))]
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(table(cells, {c.name: pending(c, "") for c in cells}, dict.fromkeys(names(cells), 7.3e8)))
    lines = [line for line in console.export_text().splitlines() if line.strip()]
    assert max(map(len, lines)) <= width
    rows: list[list[str]] = []
    for line in lines[2:]:  # after the titles and the rule
        words = line.split()
        if len(words) > 1:
            rows.append(words)
        else:  # a narrow terminal folds names
            rows[-1][1] += words[0]
    assert rows == [[str(number), cell.name, "pending", "~8,449", "days"] for number, cell in enumerate(cells, 1)]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("seed=7", ["ranks-1_seed-7", "ranks-2_seed-7"]),
        ("seed=[7, 8]", ["ranks-1_seed-7", "ranks-1_seed-8", "ranks-2_seed-7", "ranks-2_seed-8"]),
        ("ranks=2", ["ranks-2_seed-1", "ranks-2_seed-2", "ranks-2_seed-3"]),
        (
            "length=[64, 1K]",
            [f"ranks-{a}_length-{n}" for a in ("1_seed-1", "1_seed-2", "2_seed-3") for n in (64, 1024)],
        ),
    ],
)
def test_a_change_replaces_a_setting_anywhere_in_the_file(change: str, expected: list[str], tmp_path: Path) -> None:
    text = "grid: {ranks: 1, seed: [1, 2]}\nexclude: [{seed: 2, ranks: 9}]\ninclude: [{ranks: 2, seed: 3}]"
    path = write(tmp_path, f"fixed: {{{FIXED}}}\n{text}")
    with pytest.raises(ValueError, match="matches no cell"):
        expand(read_sweep(path))
    assert names(expand(read_sweep(path, [change]))) == expected


def test_changes_apply_to_fixed_flags_data_and_sweep_keys(tmp_path: Path) -> None:
    data = "data: {kind: zipf, documents: 4, length: 1K, vocab_size: 32000, output: data/a}"
    fixed = FIXED.replace(", data_path: data/any", ", set_seed: 42")  # an older spelling of seed
    path = write(tmp_path, f"{data}\nfixed: {{{fixed}}}\ngrid: {{length: [64, 128]}}\ninclude: [{{max_steps: 5}}]")
    changes = ["max_steps=9", "seed=7", "fsdp=", f"output_dir={tmp_path}", "timeout_seconds=5"]
    sweep = read_sweep(path, [*changes, "data.vocab_size=512", "data.length=2K", "data.output=data/b"])
    assert {(c.config.max_steps, c.config.seed, c.config.fsdp) for c in expand(sweep)} == {(9, 7, "")}
    assert (sweep.output_dir, sweep.timeout_seconds) == (tmp_path, 5)
    flags = {"kind": "zipf", "documents": "4", "length": "2048", "vocab_size": "512", "seed": "0", "output": "data/b"}
    assert sweep.data == flags

    sweep = read_sweep(path, ["data_path=data/mine"])  # instead of what the file would make
    assert sweep.data is None and {cell.config.data_path for cell in expand(sweep)} == {"data/mine"}
    with pytest.raises(ValueError, match=r"--set data.length=2K: .*sweep.yaml has no data of its own; set data_path"):
        read_sweep(path, ["data_path=data/mine", "data.length=2K"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("sed=7", "--set sed=7: sed is not a setting; did you mean seed"),
        ("foo=1", "--set foo=1: foo is not a setting; there are model, length, .* and the flags of llama3/train.py"),
        ("resume_from_checkpoint=auto", "every cell gets its own resume_from_checkpoint; leave it out"),
        ("seed", "KEY=VALUE"),
        ("=7", "KEY=VALUE"),
        ("seed=[7", "neither a word"),
        ("seed=", "whole number"),
    ],
)
def test_an_invalid_change_is_refused(change: str, said: str, tmp_path: Path) -> None:
    path = write(tmp_path, f"fixed: {{{FIXED}}}\ngrid: {{seed: [1, 2]}}")
    with pytest.raises(ValueError, match=said):
        expand(read_sweep(path, [change]))


def test_a_requeued_run_still_is_its_cell() -> None:
    config = parse(["--model_name_or_path", "m", "--data_path", "d", "--output_dir", "o"], "").to_json()
    resumed = {**config, "resume_from_checkpoint": "auto", "output_dir": "elsewhere"}
    assert comparable(resumed) == comparable(config) != comparable({**config, "seed": 7})
