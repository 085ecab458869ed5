"""Reading of sweep files: their cells and refusals."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from launch.sweep_file import Cell, read_sweep
from launch.sweep_run import comparable, slurm_command
from lightseq.config.command_line import parse

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = sorted((ROOT / "launch" / "sweeps").glob("*.yaml"))
VOCABULARY = {"llama2": 32000}  # others have 128256
FIXED = "model: tiny-llama3, random_init: true, max_steps: 2, data_path: data/any"


def write(directory: Path, text: str) -> Path:
    path = directory / "sweep.yaml"
    path.write_text(text)
    return path


def cells_of(directory: Path, text: str) -> Sequence[Cell]:
    return read_sweep(write(directory, f"fixed: {{{FIXED}}}\n{text}")).cells


def names(cells: Sequence[Cell]) -> list[str]:
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


def test_a_cell_is_named_after_its_model_and_stays_in_the_directory_of_the_sweep(tmp_path: Path) -> None:
    cells = cells_of(tmp_path, "grid: {model: [models/a/, models/b/, ..]}")
    assert names(cells) == ["a", "b", "none"]


def test_a_job_may_take_as_long_as_its_cell(tmp_path: Path) -> None:
    path = write(tmp_path, f"fixed: {{{FIXED}}}\ngrid: {{ranks: 1}}")
    for seconds, minutes in (("0.5", "1"), ("60", "1"), ("60.5", "2")):  # no limit is 0 minutes
        sweep = read_sweep(path, [f"timeout_seconds={seconds}"])
        assert f"--time={minutes}" in slurm_command(sweep, sweep.cells[0])


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
        ("grid: {schedul: [ring]}", "schedul-ring: unknown flag --schedul; did you mean --schedule?"),
        ("gird: {schedule: [ring]}", "gird: unknown; keys are"),
        ("grid: {schedule: [ring], schedule: [zigzag]}", " line 2: schedule is given twice"),
        ("grid: {schedule: [ring}", " line 2: "),
        ("grid: [ring]", "grid: give `setting: value` lines"),
        ("grid: {ranks: 1}\ninclude: [{ranks: 2}, ring]", "include[1]: give `setting: value` lines"),
        ("grid: {schedule: []}", "grid.schedule: give one value or a list"),
        ("grid: {rope_scaling: [{factor: 2}]}", "grid.rope_scaling: give one value or a list; put JSON in quotes"),
        ("grid: {output_dir: [a]}", "grid.output_dir: every cell gets its own"),
        ("grid: {model: [a-llama3], model_name_or_path: [b]}", "grid.model_name_or_path: model_name_or_path is given"),
        ("grid: {ranks: [0]}", "ranks: '0' is not a number of processes"),
        ("grid: {dtype: [int8]}", "dtype: 'int8': give one of bfloat16"),
        (
            "grid: {dtype: [float16], bf16: [true]}",
            "dtype: 'float16': give one of bfloat16, float16",
        ),
        ("grid: {schedule: [ringg]}", "schedule-ringg: --schedule 'ringg' is unknown; choose from auto, ring"),
        ("grid: {batch: [0]}", "batch-0: --per_device_train_batch_size 0: give at least 1"),
        ("grid: {length: [4KB]}", "grid.length 4KB is not a number of tokens"),
        ("grid: {ranks: [1]}\nexclude: [{ranks: 2}]", "exclude[0]: matches no cell"),
        ("grid: {ranks: [1]}\nexclude: {ranks: 1}", "exclude[0]: give `setting: value` lines"),
        ("grid: {ranks: [1]}\nexclude: [{ranks: 1}]", "grid: no cell is left"),
        ("", "grid: no cell is left; give settings in grid or include"),
        ("grid: {ranks: 1}\ntimeout_seconds: soon", "timeout_seconds: 'soon' is not a number above 0"),
        ("grid: {ranks: 1}\ngpus_per_node: 0.5", "gpus_per_node: '0.5' is not a whole number"),
        ("grid: {ranks: 1}\noutput_dir: ''", "output_dir: '' is not a directory"),
        ("grid: {ranks: 1}\noutput_dir: [a]", "output_dir: ['a'] is not a directory"),
        (
            "grid: {ranks: 1}\ndata: {kind: zipf}",
            "the following arguments are required: --documents, --length, --output; python3 -m data_gen",
        ),
        ("grid: {tokenizer: [a/b, a-b]}", "tokenizer-a-b: two cells have this name"),
    ],
)
def test_a_mistake_is_one_line_with_file_and_key(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as refused:
        cells_of(tmp_path, text)
    line = str(refused.value)
    assert line.startswith(f"{tmp_path / 'sweep.yaml'}") and said in line and "\n" not in line


def test_a_list_among_the_fixed_settings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"fixed\.ranks: give one value"):
        read_sweep(write(tmp_path, "fixed: {ranks: [1, 2]}"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_trainer_takes_every_cell_of_the_shipped_sweeps(path: Path) -> None:
    sweep = read_sweep(path)
    assert len(sweep.cells) > 5
    for cell in sweep.cells:
        config = parse(cell.words, "lightseq train")
        assert config.output_dir == str(cell.output_dir) and config.random_init and config.max_steps
        assert sweep.data is not None
        assert config.model_max_length <= sweep.data.length, "a document of the data is a whole sequence"
        words = VOCABULARY.get(config.model_name[:6], 128256)
        assert sweep.data.vocab_size <= words, "its ids are words of the model"
        slurm_command(sweep, cell)


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
        read_sweep(path)
    assert names(read_sweep(path, [change]).cells) == expected


def test_changes_apply_to_fixed_flags_data_and_sweep_keys(tmp_path: Path) -> None:
    data = "data: {kind: zipf, documents: 4, length: 1K, vocab_size: 32000, output: data/a}"
    fixed = FIXED.replace(", data_path: data/any", ", set_seed: 42")  # an older spelling of seed
    path = write(tmp_path, f"{data}\nfixed: {{{fixed}}}\ngrid: {{length: [64, 128]}}\ninclude: [{{max_steps: 5}}]")
    changes = ["max_steps=9", "seed=7", "fsdp=", f"output_dir={tmp_path}", "timeout_seconds=5"]
    sweep = read_sweep(path, [*changes, "data.vocab_size=512", "data.length=2K", "data.output=data/b"])
    assert {(c.config.max_steps, c.config.seed, c.config.fsdp) for c in sweep.cells} == {(9, 7, "")}
    assert (sweep.output_dir, sweep.cell_seconds) == (tmp_path, 5)
    assert sweep.data is not None and {cell.config.data_path for cell in sweep.cells} == {"data/b"}
    assert (sweep.data.length, sweep.data.vocab_size, sweep.data.seed) == (2048, 512, 0)

    sweep = read_sweep(path, ["data_path=data/mine"])  # instead of what the file would make
    assert {cell.config.data_path for cell in sweep.cells} == {"data/mine"}
    path.write_text(path.read_text().replace(data, ""))
    with pytest.raises(ValueError, match=r"--set data.length=2K: the file has no data; set data_path"):
        read_sweep(path, ["data.length=2K"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("sed=7", "unknown flag --sed; did you mean --seed"),
        ("resume_from_checkpoint=auto", "resume_from_checkpoint: every cell gets its own; leave it out"),
        ("seed", "KEY=VALUE"),
        ("=7", "KEY=VALUE"),
        ("seed=[7", "neither a word"),
        ("seed=", "whole number"),
    ],
)
def test_an_invalid_change_is_refused(change: str, said: str, tmp_path: Path) -> None:
    path = write(tmp_path, f"fixed: {{{FIXED}}}\ngrid: {{seed: [1, 2]}}")
    with pytest.raises(ValueError, match=said):
        read_sweep(path, [change])


def test_a_requeued_run_still_is_its_cell() -> None:
    config = parse(["--model_name_or_path", "m", "--data_path", "d", "--output_dir", "o"], "").to_json()
    resumed = {**config, "resume_from_checkpoint": "auto", "output_dir": "elsewhere"}
    assert comparable(resumed) == comparable(config) != comparable({**config, "seed": 7})
