"""Every causal language model class of transformers over ranks, and the table that lists them."""

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import architectures
from benchmarks.class_table import Outcome
from lightseq import hf

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "docs" / "classes.csv"


def sweep(folder: Path, *flags: str, seconds: int, ranks: int = 2) -> tuple[subprocess.CompletedProcess, list[Outcome]]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    program = ["-m", "benchmarks.architectures", "--output", str(folder / "out.jsonl"), *flags]
    done = subprocess.run([*launcher, *program], cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    assert (folder / "out.jsonl").is_file(), done.stderr
    return done, [Outcome(**json.loads(line)) for line in (folder / "out.jsonl").read_text().splitlines()]


def rows_of(table: Path) -> dict[str, list[str]]:
    """Returns the columns behind the name of each class."""
    with table.open(newline="", encoding="utf-8") as opened:
        return {name: columns for name, *columns in csv.reader(opened)}


@pytest.mark.slow
def test_some_classes_are_exact_or_refused_and_the_table_says_which(tmp_path: Path) -> None:
    table = tmp_path / "classes.csv"
    done, found = sweep(tmp_path, "--only", "llama,gemma3_text,mixtral,doge", "--csv", str(table), seconds=200)
    assert done.returncode == 0, done.stdout
    kinds = {(x.model_type, x.way): x.kind for x in found}
    assert kinds["llama", "train packed"] == kinds["gemma3_text", "rope dynamic"] == "exact"
    assert kinds["mixtral", "loop packed"] == "exact" and kinds["mixtral", "router loss"] == "exact"
    assert kinds["doge", "loop"] == "refused"
    rows = rows_of(table)
    exact = ["exact"] * 4 + [""]
    assert [*rows] == ["class", *(f"{name}ForCausalLM" for name in ("Doge", "Gemma3", "Llama", "Mixtral"))]
    assert rows["Gemma3ForCausalLM"] == rows["LlamaForCausalLM"] == rows["MixtralForCausalLM"] == exact
    ran = ["refused", "not run", "refused", "not run"]
    assert rows["DogeForCausalLM"] == [*ran, "attention with its own mask"]


def test_the_page_of_models_counts_the_rows_of_the_table() -> None:
    _, *rows = rows_of(TABLE).values()
    assert {kind for row in rows for kind in row[:4]} == {"exact", "refused", "not run"}
    assert all(row[4] for row in rows if row[:4] != ["exact"] * 4)
    loop, everywhere = sum(row[0] == "exact" for row in rows), sum(row[:4] == ["exact"] * 4 for row in rows)
    page = " ".join((ROOT / "docs" / "models.md").read_text().split())
    said = f"{len(rows)} classes of transformers, of which {everywhere} train exactly under `lightseq train` and {loop}"
    assert said in page


FAMILIES = ("cohere", "gemma2", "gemma3_text", "gpt_oss", "granite", "mistral")  # windows, sinks, caps, scaled logits


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_class_is_exact_or_refused_and_the_table_says_which(tmp_path: Path) -> None:
    table = tmp_path / "classes.csv"
    done, found = sweep(tmp_path, "--csv", str(table), seconds=880)
    assert done.returncode == 0 and not [x for x in found if x.kind in ("wrong", "raised")], done.stdout
    assert sum(x.kind == "exact" and x.way == "loop" for x in found) > 50
    if f"transformers {transformers.__version__}," in TABLE.read_text():
        not_installed = {x.model_class for x in found if "ModuleNotFoundError" in x.line}
        made, listed = rows_of(table), rows_of(TABLE)
        assert [*made] == [*listed], "make the table again: docs/models.md has the command"
        assert not [name for name in made if made[name] != listed[name] and name not in not_installed]


def test_a_head_with_a_bias_trains_as_one_process_does(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_bias(model: LlamaForCausalLM, config: LlamaConfig) -> None:
        build(model, config)
        model.lm_head.bias = torch.nn.Parameter(torch.randn(config.vocab_size))

    build = LlamaForCausalLM.__init__
    monkeypatch.setattr(LlamaForCausalLM, "__init__", with_bias)
    for tied in (False, True):
        config = architectures.tiny_config("llama", head_bias=True, tie_word_embeddings=tied)
        for packed in (False, True):
            assert architectures.compare_training(config, packed).startswith("loss within")


def test_a_loop_takes_a_model_whose_layers_have_names_of_their_own(alone: None) -> None:
    assert architectures.compare_loop(architectures.tiny_config("dbrx"), packed=False).startswith("loss within")


@pytest.mark.parametrize(
    ("fault", "line"),
    [pytest.param("labels", "loss", marks=pytest.mark.slow), ("positions", "loss"), ("documents", "loss")],
)
def test_the_sweep_notices_a_planted_fault(alone: None, monkeypatch: pytest.MonkeyPatch, fault: str, line: str) -> None:
    def broken(context: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        batch = shard_batch(context, *args, **kwargs)
        if fault == "labels":
            batch["shift_labels"] = batch["labels"].roll(1, -1)
        elif fault == "documents" and "documents" in batch:
            del batch["documents"]
            batch["position_ids"] = context.sequence.positions(architectures.LENGTH, architectures.CPU)
        elif fault == "positions":
            monkeypatch.setattr("lightseq.hf.checks.check_positions", lambda *_: None)
            batch["position_ids"] = batch["position_ids"] * 3
        return batch

    shard_batch = hf.shard_batch
    monkeypatch.setattr(hf, "shard_batch", broken)
    found = {x.way: x for x in architectures.tried("llama")}
    way = "loop packed" if fault == "documents" else "loop"
    assert found[way].kind == "wrong" and found[way].line.startswith(line)


def test_with_train_flags_the_sweep_trains_with_these_flags_only(alone: None) -> None:
    plain, packed = architectures.tried("llama", ("--tile_layers", "True"))
    assert (plain.way, packed.way) == ("train", "train packed") and plain.kind == packed.kind == "exact"
    (refused,) = architectures.tried("llama", ("--schedule", "nowhere"))
    assert refused.kind == "refused" and "--schedule 'nowhere' is unknown" in refused.line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "exact"),
    [
        ("--torch_compile True", {*FAMILIES}),
        ("--remat none", {*FAMILIES}),
        ("--remat attention+mlp", {"cohere", "gemma2", "gemma3_text", "granite", "mistral", "gpt_oss"}),
        ("--tile_layers True", {"mistral"}),
    ],
)
def test_families_are_exact_or_refused_with_memory_flags(flags: str, exact: set[str], tmp_path: Path) -> None:
    done, found = sweep(tmp_path, "--only", ",".join(FAMILIES), "--train_flags", flags, seconds=400)
    assert done.returncode == 0, done.stdout
    assert {x.model_type for x in found if x.kind == "exact"} == exact


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--train_flags", "--remat nothing"), "--train_flags: --remat 'nothing' is unknown"),
        (("--train_flags", "--remat none", "--csv", "page.csv"), "--csv lists every way of training"),
    ],
)
def test_wrong_flags_of_the_sweep_are_refused(flags: tuple[str, ...], line: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        architectures.main(flags)
    assert line in capsys.readouterr().err
