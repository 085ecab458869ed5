"""The chess fine-tune: legal games in and out, flags as its guide has them, and a run of it."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
CHESS = ROOT / "examples" / "chess"
chess = pytest.importorskip("chess")
pytest.importorskip("chess.pgn")
sys.path.insert(0, str(CHESS))

import downloadmodel  # noqa: E402
import finetune  # noqa: E402
import games  # noqa: E402

from lightseq.config.command_line import parse  # noqa: E402
from lightseq.training.metrics import read_records  # noqa: E402

PGN = """[Event "one"]
[Result "1-0"]

1. e4 e5 2. Bc4 Nc6 {a comment} 3. Qh5 Nf6?? (3... g6) 4. Qxf7# 1-0

[Event "two"]
[Result "*"]

1. e4 e4 2. Nf3 *

[Event "three"]
[Result "1/2-1/2"]

1/2-1/2
"""
MATE = "1. e4 e5 2. Bc4 Nc6 3. Qh5 Nf6 4. Qxf7# 1-0"


def rows_of(source: Path | None, count: int = 1) -> str:
    output = source.with_suffix(".jsonl") if source else Path("made-up.jsonl")
    return games.write(*games.source_of(source, count, seed=0), output)


def replay(text: str) -> Any:
    board = chess.Board()
    *words, result = text.split()
    for word in words:
        if not word.endswith("."):
            board.push_san(word)
    assert result in ("1-0", "0-1", "1/2-1/2", "*")
    return board


def test_games_that_are_made_up_are_legal_and_each_its_own() -> None:
    texts = [games.random_game(seed) for seed in range(6)]
    for text in texts:
        assert replay(text).is_game_over() or replay(text).fullmove_number > games.LONGEST_GAME // 2
    assert len(set(texts)) == 6 and games.random_game(3) == texts[3]


def test_pgn_becomes_rows_and_what_is_illegal_is_counted_and_named(tmp_path: Path) -> None:
    (tmp_path / "a.pgn").write_text(PGN)
    said = rows_of(tmp_path / "a.pgn")
    assert [json.loads(line)["text"] for line in (tmp_path / "a.jsonl").read_text().splitlines()] == [MATE]
    meta = json.loads((tmp_path / "a.meta.json").read_text())
    assert meta["skipped"] == 2 and "game 2: illegal" in meta["skipped_games"][0] and "game 3: without a move" in said
    assert replay(MATE).is_checkmate()


@pytest.mark.parametrize(
    ("headers", "moves", "reason"),
    [
        ("", "1. e4 e5 (1... zz) c5) 2. Nf3 {cut", "unreadable"),  # python-chess loses count of its parentheses
        ("", "1. e4 e5 (1... zz) c5)\n2. Nf3\n2. e4 {x}", "unreadable"),
        ('[FEN "garbage fen"]\n', "1. e4 *", "illegal (expected 'w' or 'b'"),
        ('[Variant "Foo"]\n', "1. e4 *", "illegal (unsupported variant: Foo"),
        ('[Variant "Antichess"]\n', "1. e4 *", "not chess from its initial position"),
        ('[SetUp "1"]\n[FEN "8/8/8/8/8/4k3/8/4K3 b - - 0 1"]\n', "1... Kd4 2. Kd2 *", "not chess from its initial"),
        ("", "1. e4 0000 2. d4 *", "illegal (a null move)"),
        ("", "1. -- *", "illegal (a null move)"),
    ],
)
def test_games_beside_one_that_cannot_be_are_kept(tmp_path: Path, headers: str, moves: str, reason: str) -> None:
    broken = f'[Event "b"]\n{headers}\n{moves}\n\n'
    (tmp_path / "a.pgn").write_text('[Event "a"]\n\n1. e4 *\n\n' + broken + '[Event "c"]\n[Result "odd"]\n\n1. c4 *\n')
    read = list(games.read(tmp_path / "a.pgn"))
    assert [text for _, text, _ in read] == ["1. e4 *", None, "1. c4 *"]
    assert read[1][0].endswith("game 2") and read[1][2].startswith(reason)


def test_a_file_that_is_no_pgn_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.pgn").write_bytes(random.Random(0).randbytes(3000))
    with pytest.raises(ValueError, match=r"a\.pgn game 1: "):
        rows_of(tmp_path / "a.pgn")
    assert not [path for path in tmp_path.iterdir() if path.suffix not in (".pgn", ".lock")]


def test_rows_are_kept_for_the_same_games_and_written_anew_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def written(source: Path | None, count: int = 1) -> tuple[str, int, int]:
        said, output = rows_of(source, count), tmp_path / (f"{source.stem}.jsonl" if source else "made-up.jsonl")
        return said, output.read_text().count("\n"), output.stat().st_mtime_ns

    assert [written(None, count)[1] for count in (3, 6, 4)] == [3, 6, 4]
    (tmp_path / "a.pgn").write_text(PGN)
    first = written(tmp_path / "a.pgn")
    assert "left out: 2" in first[0] and written(tmp_path / "a.pgn") == first
    (tmp_path / "a.pgn").write_text(PGN + '\n[Event "four"]\n\n1. d4 *\n')
    assert written(tmp_path / "a.pgn")[1] == 2
    (tmp_path / "a.moves").write_text("c4\n")
    assert written(tmp_path / "a.moves")[1] == 1, "of a source with the same stem"
    (tmp_path / "a.meta.json").unlink()
    with pytest.raises(ValueError, match=r"a\.jsonl exists and was not written by this script"):
        rows_of(tmp_path / "a.pgn")
    assert (tmp_path / "a.jsonl").read_text() == '{"text": "1. c4 *"}\n'


def test_files_beside_the_games_that_were_not_made_here_stay(tmp_path: Path) -> None:
    (tmp_path / "a.moves").write_text("c4\n")
    (tmp_path / "games.meta.json").write_text('{"mine": 1}')
    (tmp_path / "games.lock").write_text("mine")
    with pytest.raises(ValueError, match=r"games\.meta\.json exists and was not written by this script"):
        games.write(*games.source_of(tmp_path / "a.moves", None, seed=0), tmp_path / "games.jsonl")
    assert (tmp_path / "games.meta.json").read_text() == '{"mine": 1}'
    assert (tmp_path / "games.lock").read_text() == "mine"


def test_lines_of_moves_become_rows(tmp_path: Path) -> None:
    lines = [
        "1. e4 e5 2. Bc4 Nc6 3.Qh5 Nf6 4. Qxf7# 1-0",
        "e2e4 e7e5 f1c4 b8c6 d1h5 g8f6 h5f7",
        "e4 Ke7",
        "e4 0000 d4",
        "e4 e5 0-1",
    ]
    (tmp_path / "a.moves").write_text("\n".join(lines))
    read = list(games.read(tmp_path / "a.moves"))
    assert [text for _, text, _ in read[:2]] == [MATE, MATE]
    assert read[2][1] is None and read[2][0].endswith("line 3") and "illegal" in read[2][2]
    assert read[3][1] is None and read[3][2] == "illegal (a null move)"
    assert read[4][1] == "1. e4 e5 0-1", "who resigned is on the line alone"


def test_files_without_games_are_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.pgn").write_text("")
    with pytest.raises(ValueError, match="the source is empty"):
        rows_of(tmp_path / "a.pgn")
    for name in ("none.pgn", "a.csv"):
        (tmp_path / "a.csv").write_text("e4")
        with pytest.raises(ValueError, match=name):
            games.read(tmp_path / name)


@pytest.mark.parametrize(
    ("asked", "ranks", "each"), [(8, 4, 2), (1, 4, 1), (2, 4, 1), (6, 4, 2), (8, 1, 8), (3, 8, 1), (8, 3, 3)]
)
def test_accumulation_is_shared_and_never_nothing(asked: int, ranks: int, each: int) -> None:
    found, note = finetune.passes(asked, ranks)
    assert found == each
    assert (note is None) is (each * ranks == asked)
    assert note is None or f"takes {each * ranks} passes instead of {asked}" in note


def test_the_guide_shows_flags_of_training(tmp_path: Path) -> None:
    given = "--output_dir out --batch_size_per_device 4 --gradient_accumulation_steps 2 --no_fsdp --lora_rank 4"
    arguments, more = finetune.parser().parse_known_args([*given.split(), "--gradient_checkpointing"])
    asked, note = finetune.words(arguments, more, tmp_path / "a.jsonl", 4)
    config = parse(asked, "train")
    assert (config.per_device_train_batch_size, config.gradient_accumulation_steps, config.fsdp_mode) == (4, 1, "ddp")
    assert config.remat_policy == "attention" and config.lora_rank == 4 and config.sequence_parallel_size == 1
    assert note is not None and "raised to 1" in note
    alone = finetune.words(finetune.parser().parse_args(["--output_dir", "out"]), [], tmp_path / "a.jsonl", 4)
    assert parse(alone[0], "train").remat_policy == "none" and alone[1] is None
    arguments.gradient_accumulation_steps = 0
    with pytest.raises(ValueError, match="--gradient_accumulation_steps 0: give at least 1"):
        finetune.words(arguments, more, tmp_path / "a.jsonl", 4)


@pytest.mark.parametrize("spelling", ["_parallel_size 2", "_parallel_size=2", "-parallel-size 2", "-parallel-size=2"])
def test_ranks_that_share_a_sequence_do_not_share_its_passes(tmp_path: Path, spelling: str) -> None:
    given = f"--output_dir out --gradient_accumulation_steps 8 --sequence{spelling}"
    arguments, more = finetune.flags_of(given.split())
    words, note = finetune.words(arguments, more, tmp_path / "a.jsonl", 2)
    config = parse(words, "train")
    assert (config.gradient_accumulation_steps, config.sequence_parallel_size, note) == (8, 2, None)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--sequence_parallel_size", "--sequence_parallel_size: expected one argument"),
        ("--sequence_parallel_size 0", "--sequence_parallel_size 0: give at least 1"),
        ("--sequence_parallel_size two", "--sequence_parallel_size: invalid int value: 'two'"),
    ],
)
def test_impossible_requests_are_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: str, line: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "--games", "1", "--output_dir", str(tmp_path), *flags.split()])
    assert finetune.main() == 2
    said = capsys.readouterr()
    assert line in said.err and said.err.startswith("error: ") and said.err.count("\n") == 1


def test_flags_of_training_override_the_guide(tmp_path: Path) -> None:
    for flags, policy in (("", "none"), ("--remat full", "full"), ("--gradient-checkpointing", "attention")):
        arguments, more = finetune.flags_of(f"--output_dir out --model-max-length 64 {flags}".split())
        config = parse(finetune.words(arguments, more, tmp_path / "a.jsonl", 1)[0], "train")
        assert config.remat_policy == policy and config.model_max_length == 64


def test_a_model_is_fetched_for_nodes_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fetch(model: str, local_dir: Path, allow_patterns: list[str]) -> None:
        if model == "ada/none":
            raise OSError("no network\nat all")
        local_dir.mkdir()
        (local_dir / ("model.safetensors" if model == "ada/new" else "model.bin")).touch()

    monkeypatch.setattr(downloadmodel.huggingface_hub, "snapshot_download", fetch)
    for model, status, line in (
        ("new", 0, "finetune.py"),
        ("old", 2, "has no safetensors"),
        ("none", 2, "(OSError: no network)"),
    ):
        monkeypatch.setattr(sys, "argv", ["x", "--model", f"ada/{model}", "--output", str(tmp_path / model)])
        assert downloadmodel.main() == status
        said = capsys.readouterr()
        assert line in said.out + said.err and (said.out + said.err).count("\n") == 1


def test_the_slurm_script_starts_a_process_a_gpu_and_needs_no_network(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$HF_HUB_OFFLINE" "$@"\n')
    python.chmod(0o755)
    (tmp_path / "model").mkdir()
    given = {"PATH": os.environ["PATH"], "PYTHON": str(python), "SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_ID": "7"}

    def submit(model: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", str(CHESS / "slurm_submit.sh"), "--no_fsdp"]
        environment = given | {"MODEL": str(tmp_path / model)}
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)

    assert submit("model").returncode == 2 and "downloadmodel.py" in submit("model").stderr
    (tmp_path / "model" / "config.json").write_text("{}")
    offline, *words = submit("model").stdout.splitlines()
    assert offline == "1" and words[:4] == ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4"]
    assert words[4] == "examples/chess/finetune.py" and words[-2:] == ["outputs/chess-7", "--no_fsdp"]


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["--gradient_checkpointing", "--no_fsdp"])
def test_the_fine_tune_learns_on_two_processes(tmp_path: Path, flags: str) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    words = (
        f"--model_name_or_path tiny-llama2 --random_init --tokenizer byte --games 30 --output_dir {tmp_path}/out "
        f"--data_cache {tmp_path}/cache --max_steps 20 --model_max_length 128 --learning_rate 3e-3 "
        f"--batch_size_per_device 2 --gradient_accumulation_steps 1 {flags}"
    )
    done = subprocess.run(
        [*launcher, str(CHESS / "finetune.py"), *words.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert "30 games in" in done.stdout and "takes 2 passes instead of 1" in done.stdout
    losses = [record["loss"] for record in read_records(tmp_path / "out" / "metrics.jsonl")]
    assert losses[-1] < losses[0] - 1
