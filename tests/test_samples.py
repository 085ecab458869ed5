"""Runs on texts that hold out a part, write samples and stop early, alone and resumed, on two ranks."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from programs import Ended, programs
from transformers import AutoModelForCausalLM, LlamaConfig
from worlds import spawn

from lightseq.checkpoint.checkpoints import read_trainer_state
from lightseq.config.command_line import parse
from lightseq.data.load_tokenizer import load_tokenizer
from lightseq.tools import generate
from lightseq.training.metrics import read_records
from lightseq.training.sample_prompts import read_sample_prompts

ROOT = Path(__file__).resolve().parent.parent
PROMPTS, NEW_TOKENS = ["the cat", "a dog ", "one two three"], 12
QUICK = "sampled", "resumed", "resumed again", "stopped"
STOPS_AT_THE_SECOND = "--early_stopping_patience 1 --early_stopping_threshold 9"  # evaluation


class Runs(NamedTuple):
    root: Path
    ends: dict[str, Ended]

    def train(self, *outputs: str) -> None:
        """Trains those that have not been trained, one after the other in one start of two ranks."""
        lines = {output: flags for output, flags in command_lines(self.root).items() if output in outputs}
        missing = {output: flags for output, flags in lines.items() if output not in self.ends}
        if not missing:
            return
        words = [f"{flags} --output_dir {self.root}/{output.split()[0]}" for output, flags in missing.items()]
        for output, end, other in zip(missing, *spawn(2, programs, "llama3", words), strict=True):
            assert end.status == other.status == 0, f"{output}: {end.err}{other.err}"
            assert not other.out, "only rank 0 speaks"
            self.ends[output] = end

    def records(self, output: str, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
        return read_records(self.root / output / name)

    def losses(self, output: str) -> list[tuple[int, float]]:
        return [(r["step"], r["loss"]) for r in self.records(output) if "loss" in r]

    def evaluations(self, output: str) -> list[dict[str, Any]]:
        return [r for r in self.records(output) if "eval_loss" in r]

    def ended(self, output: str) -> Any:
        return json.loads((self.root / output / "run.json").read_text())["ended"]


def command_lines(root: Path) -> dict[str, str]:
    """Returns flags by output; what stands after a space is a run that continues in the output's folder."""
    common = (
        f"--model_name_or_path {root}/model --random_init --tokenizer byte --data_path {root}/texts "
        f"--data_cache {root}/cache --model_max_length 96 --learning_rate 1e-2 --lr_scheduler_type constant "
        "--eval_fraction 0.25 --per_device_eval_batch_size 2"
    )
    samples = f"--sample_prompts {root}/prompts --sample_max_new_tokens {NEW_TOKENS}"
    steps = "--eval_steps 2 --save_steps 2 --max_steps 4"
    stops = "--max_steps 9 --eval_strategy steps --eval_steps 1 --save_steps 1 --learning_rate 3"
    stops += " --early_stopping_patience 2 --save_total_limit 1"
    packed = "--packing best_fit --per_device_eval_batch_size 1"
    return {
        "plain": f"{common} {steps}",
        "sampled": f"{common} {steps} {samples}",
        "resumed": f"{common} {steps} {samples} --max_steps 2",
        "resumed again": f"{common} {steps} {samples} --resume_from_checkpoint True",
        "copies": f"{common} {steps} {samples} --sequence_parallel_size 1",
        "epochs": f"{common} --num_train_epochs 1.5 --save_strategy no {packed}",
        "stopped": f"{common} {stops}",
        "stopped again": f"{common} {stops} --resume_from_checkpoint True",
        "zero3": f"{common} {steps} {samples} --max_steps 8 --deepspeed {root}/zero3.json {STOPS_AT_THE_SECOND}",
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    root = tmp_path_factory.mktemp("texts")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaConfig(vocab_size=257, num_key_value_heads=2, **sizes).save_pretrained(root / "model")
    (root / "texts").mkdir()
    for i in range(12):
        (root / "texts" / f"{i}.txt").write_text(f"the cat and the dog number {i} " * (i + 1))
    (root / "prompts").write_text("\n".join(["", *PROMPTS]) + "\n")
    (root / "zero3.json").write_text('{"zero_optimization": {"stage": 3}}')
    found = Runs(root, {})
    found.train(*QUICK)
    return found


@pytest.mark.slow
def test_losses_are_the_same_with_and_without_samples(runs: Runs) -> None:
    runs.train("plain")
    assert runs.losses("sampled") == runs.losses("plain")
    assert runs.evaluations("sampled") == runs.evaluations("plain")


@pytest.mark.parametrize("output", ["sampled", pytest.param("copies", marks=pytest.mark.slow)])
def test_samples_match_generate_from_the_same_checkpoint(
    runs: Runs, output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.train(output)
    samples = runs.records(output, "samples.jsonl")
    assert [r["step"] for r in samples] == [2] * 3 + [4] * 3
    assert [r["prompt"] for r in samples] == PROMPTS * 2
    given = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    for step in (2, 4):
        checkpoint = f"{runs.root}/{output}/checkpoint-{step}"
        words = [checkpoint, *given, "--temperature", "0", "--max_new_tokens", str(NEW_TOKENS)]
        assert generate.continuations(generate.parser().parse_args(words)) == [
            r["text"] for r in samples if r["step"] == step
        ]
    shown = samples[-1]["text"].splitlines()[0]
    assert f"step 4: sample\n    {shown}" in runs.ends[output].out


def test_a_resumed_run_has_the_rows_evaluations_and_samples_of_one_that_did_not_stop(runs: Runs) -> None:
    assert runs.losses("resumed") == runs.losses("sampled")
    assert runs.evaluations("resumed") == runs.evaluations("sampled")
    assert runs.records("resumed", "samples.jsonl") == runs.records("sampled", "samples.jsonl")


@pytest.mark.slow
def test_without_a_schedule_a_held_out_part_is_evaluated_after_each_epoch_and_at_the_end(runs: Runs) -> None:
    runs.train("epochs")
    first, last = (r["step"] for r in runs.evaluations("epochs"))
    assert first < last == runs.losses("epochs")[-1][0]
    assert "held out 3 of 12 documents for evaluation" in runs.ends["epochs"].out
    assert runs.ended("epochs") == {"reason": "completed", "step": last}


def test_a_run_stops_early_and_keeps_its_best_checkpoint(runs: Runs) -> None:
    evaluations = runs.evaluations("stopped")
    losses = {r["step"]: r["eval_loss"] for r in evaluations}
    best, last = min(losses, key=lambda step: losses[step]), max(losses)
    assert last == best + 2 < 9 and [r["stopped_early"] for r in evaluations] == [False] * (last - 1) + [True]
    checkpoints = sorted(path.name for path in (runs.root / "stopped").glob("checkpoint-*"))
    assert checkpoints == [f"checkpoint-{best}", f"checkpoint-{last}"]
    out = runs.ends["stopped"].out
    assert f"stopped early after step {last}: the evaluation loss has not improved in 2 evaluations; " in out
    assert f"best        {runs.root}/stopped/checkpoint-{best} (lowest evaluation loss)" in out
    saved = read_trainer_state(runs.root / "stopped" / f"checkpoint-{last}")
    assert saved["early_stopping"] == {"best_eval_loss": losses[best], "evaluations_without_improvement": 2}


@pytest.mark.slow
def test_a_run_that_stopped_early_trains_no_step_when_it_is_resumed(runs: Runs) -> None:
    runs.train("stopped again")
    last = runs.evaluations("stopped")[-1]["step"]
    assert f"stopped early after step {last}" in runs.ends["stopped again"].out
    assert runs.losses("stopped")[-1][0] == last
    assert runs.ended("stopped") == {"reason": "early_stopping", "step": last}


@pytest.mark.slow
def test_deepspeed_writes_the_same_samples_and_stops_early(runs: Runs) -> None:
    runs.train("zero3")
    assert runs.records("zero3", "samples.jsonl") == runs.records("sampled", "samples.jsonl")
    assert runs.losses("zero3") == [(step, pytest.approx(loss, rel=1e-5)) for step, loss in runs.losses("sampled")]
    assert [r["stopped_early"] for r in runs.evaluations("zero3")] == [False, True]
    assert runs.ended("zero3") == {"reason": "early_stopping", "step": 4}


@pytest.mark.gpu(1)
@pytest.mark.parametrize("engine", ["", "--deepspeed {0}/zero3.json"], ids=["fsdp2", "zero3"])
def test_on_gpus_samples_are_the_likeliest_tokens_and_runs_stop_early(engine: str, tmp_path: Path) -> None:
    """Runs `lightseq train` on all GPUs in bfloat16, and scores each sampled token with plain transformers."""
    if engine:
        pytest.importorskip("deepspeed")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaConfig(vocab_size=257, num_key_value_heads=2, **sizes).save_pretrained(tmp_path / "model")
    (tmp_path / "texts").mkdir()
    for i in range(12):
        (tmp_path / "texts" / f"{i}.txt").write_text(f"the cat and the dog number {i} " * 40)
    (tmp_path / "prompts").write_text("\n".join(PROMPTS))
    (tmp_path / "zero3.json").write_text('{"zero_optimization": {"stage": 3}}')
    flags = (
        "--model_name_or_path {0}/model --random_init --tokenizer byte --data_path {0}/texts --data_cache {0}/cache "
        "--output_dir {0}/out --model_max_length 512 --bf16 --learning_rate 3e-3 --max_steps 60 --eval_fraction 0.25 "
        f"--eval_steps 20 --save_steps 20 --sample_prompts {{0}}/prompts {STOPS_AT_THE_SECOND} {engine}"
    )
    command = [sys.executable, "-m", "lightseq", "train", *flags.format(tmp_path).split()]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "stopped early after step 40" in ended.stdout
    assert json.loads((tmp_path / "out" / "run.json").read_text())["ended"] == {"reason": "early_stopping", "step": 40}
    samples = read_records(tmp_path / "out" / "samples.jsonl")
    assert [(r["step"], r["prompt"]) for r in samples] == [(step, prompt) for step in (20, 40) for prompt in PROMPTS]
    tokenizer = load_tokenizer("byte")
    for step in (20, 40):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / f"checkpoint-{step}", dtype=torch.float32)
        for record in (r for r in samples if r["step"] == step):
            ids = [*tokenizer.begin, *tokenizer.encode_part(record["text"]).tolist()]
            start = len(ids) - len(record["text"].encode()) + len(record["prompt"].encode())
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0, start - 1 : -1]
            taken = logits.gather(1, torch.tensor(ids[start:])[:, None])[:, 0]
            assert len(taken) > 8 and (logits.amax(1) - taken).max() < 0.1, record  # bfloat16 rounds logits


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--tokenizer byte --sample_prompts {0}/gone", "gone cannot be read (No such file or directory); give a text"),
        ("--tokenizer byte --sample_prompts {0}/latin", "latin cannot be read (not UTF-8 text (byte 2 is 0xff)); give"),
        ("--tokenizer byte --sample_prompts {0}/blank", "blank has no prompt; write one per line"),
        ("--sample_prompts {0}/prompts", "prompts needs a tokenizer; give --tokenizer a directory, a hub id, or byte"),
        (
            "--tokenizer byte --sample_prompts {0}/prompts --sample_max_new_tokens 90",
            "prompts line 2 has 7 tokens, and with --sample_max_new_tokens 90 exceeds --model_max_length 96; shorten",
        ),
    ],
)
def test_prompts_that_cannot_be_continued_are_refused(tmp_path: Path, flags: str, line: str) -> None:
    (tmp_path / "prompts").write_text("a\nthe cat\n")
    (tmp_path / "latin").write_bytes(b"ab\xff")
    (tmp_path / "blank").write_text("\n \n")
    required = "--model_name_or_path m --data_path d --output_dir o --model_max_length 96"
    config = parse(f"{required} {flags}".format(tmp_path).split(), "")
    with pytest.raises(ValueError, match=re.escape(line)):
        read_sample_prompts(config, config.tokenizer, 300)
    with pytest.raises(ValueError, match=r"line 1 has token id 97, outside the model's vocabulary of 60"):
        words = f"{required} --tokenizer byte --sample_prompts {tmp_path}/prompts"
        read_sample_prompts(parse(words.split(), ""), "byte", 60)
