"""`lightseq train --objective distill`: losses, metrics and weights equal plain transformers on one process."""

import pickle
import re
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from programs import alone
from test_distill import plain_divergence
from test_plan_training import planned_run
from test_preferences import make_trainer, noted_passes, steps, whole_weights
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from worlds import spawn

from benchmarks.tiny_models import plain_model, tiny_config
from lightseq import hf
from lightseq.architecture.family import preset_config
from lightseq.architecture.flops import total_parameters
from lightseq.checkpoint.resume import check_flags
from lightseq.cli import BOTH
from lightseq.config.command_line import parse
from lightseq.distributed.parallel_dims import whole_tensor
from lightseq.parts.divergence import Divergence
from lightseq.plan.memory import state_bytes_on_host
from lightseq.plan.plan import plan_as_given
from lightseq.training.loop import TrainingLoop
from lightseq.training.metrics import MetricsFile, read_records
from lightseq.training.trainer import Trainer
from lightseq.utils.tensors import IGNORE_INDEX

VOCABULARY, LENGTH, STEPS, ROWS = 64, 48, 3, 2
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}  # fmt: skip
TEACHER = {**SIZES, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 3}
TARGETS = ["q_proj", "down_proj"]
# The student, more flags, and the learning rate.
CASES: dict[str, tuple[str, str, float]] = {
    "llama": ("llama", "--distill_kind reverse --distill_temperature 2", 0.05),
    "adapters": ("llama", f"--lora_rank 4 --lora_target_modules {','.join(TARGETS)} --distill_kind jsd", 0.5),
    "packed": ("llama", "--packing best_fit", 0.05),
    "hybrid": ("qwen3_5_text", "--packing best_fit", 0.002),
    "experts": ("qwen3_moe", "--distill_kind jsd --distill_beta 0.2", 0.02),
}
MEASURES = {
    "llama": Divergence("reverse", 0.5, 2.0),
    "adapters": Divergence("jsd"),
    "experts": Divergence("jsd", 0.2),
}
RESUMED = ("llama", "adapters")
Run = dict[str, Any]


def llama(sizes: dict[str, Any], seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.2))


def student_of(model_type: str) -> PreTrainedModel:
    if model_type == "llama":
        return llama(SIZES, 0)
    config = tiny_config(model_type)
    config.initializer_range = 0.05
    return plain_model(config)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distill")
    for model_type in ("llama", "qwen3_5_text", "qwen3_moe"):
        student_of(model_type).save_pretrained(folder / model_type)
    llama(TEACHER, 1).save_pretrained(folder / "teacher")
    llama(TEACHER | {"vocab_size": 72}, 1).save_pretrained(folder / "larger")
    draw = np.random.default_rng(0)
    rows = [draw.integers(3, VOCABULARY, 9 + 7 * i % 40).tolist() for i in range(24)]
    (folder / "data.pkl").write_bytes(pickle.dumps({"input_ids": rows}))
    return folder


def words_of(files: Path, name: str, output: str, more: str = "") -> str:
    student, flags, rate = CASES[name]
    return (
        f"--model_name_or_path {files}/{student} --teacher {files}/teacher --data_path {files}/data.pkl "
        f"--output_dir {files}/{output} --model_max_length {LENGTH} --objective distill --max_steps {STEPS} "
        f"--optim sgd --max_grad_norm 0 --gradient_accumulation_steps {ROWS} --save_strategy no "
        f"--eval_data_path {files}/data.pkl --eval_strategy steps --eval_steps {STEPS} --learning_rate {rate} {flags} "
        + more
    )


def documents(ids: Tensor, labels: Tensor, boundaries: Any) -> list[tuple[Tensor, Tensor]]:
    """The documents of a batch with their shifted labels."""
    if boundaries is None:
        return [(ids, labels)]
    edges = [int(x) for x in boundaries]
    return [(ids[:, a:b], labels[:, a:b]) for a, b in pairwise(edges)]


def teacher_weights(trainer: Trainer) -> list[np.ndarray]:
    models = trainer.models.frozen.values()
    return [whole_tensor(p.detach()).numpy().copy() for model in models for p in model.parameters()]


def train(rank: int, words: str, resume_from: Path | None = None) -> Run:
    trainer = make_trainer(rank, words, resume_from)
    before, teacher = whole_weights(trainer), teacher_weights(trainer)
    trainer.output_dir.mkdir(exist_ok=True)
    metrics = MetricsFile(trainer.output_dir, trainer.first_step) if rank == 0 else None
    TrainingLoop(trainer, metrics).run()
    stream, evaluation = trainer.inputs.stream, trainer.inputs.eval_stream
    assert evaluation is not None
    batches = [[stream.batch(step, a, 0) for a in range(ROWS)] for step in range(STEPS)]
    plain = [[(b.input_ids.numpy(), b.labels.numpy(), b.boundaries) for b in each] for each in (*batches, [
        evaluation.batch(step, 0, 0) for step in range(evaluation.steps)])]  # fmt: skip
    return {
        "records": read_records(metrics.path) if metrics is not None else [],
        "before": before,
        "weights": whole_weights(trainer),
        "batches": plain,
        "teacher_stayed": all(map(np.array_equal, teacher, teacher_weights(trainer))),
        "noted_passes": sum(map(noted_passes, trainer.models.frozen.values())),
    }


def train_case(rank: int, files: Path, name: str) -> list[Run]:
    """Trains on this many ranks: on one the run saves after two steps, and on two a run resumes from there."""
    size = dist.get_world_size()
    words = words_of(files, name, f"{name}-{size}")
    if size == 1:
        return [train(rank, f"{words} --save_strategy steps --save_steps 2")]
    found = [train(rank, words)]
    if size == 2 and name in RESUMED:
        found.append(train(rank, words_of(files, name, f"{name}-resumed"), files / f"{name}-1" / "checkpoint-2"))
    return found


def plain_run(_rank: int, files: Path, name: str, ours: Run) -> Run:
    """The same steps by transformers and torch, from the same weights."""
    student: Any = student_of(CASES[name][0])
    teacher = AutoModelForCausalLM.from_pretrained(files / "teacher")
    if name == "adapters":
        student = peft.get_peft_model(student, peft.LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS))
    prefix = "base_model.model." if name == "adapters" else ""
    begun = {prefix + key: torch.from_numpy(x) for key, x in ours["before"].items()}
    assert not student.load_state_dict(begun, strict=False).unexpected_keys
    measure, rate = MEASURES.get(name, Divergence()), CASES[name][2]
    trained = [p for p in student.parameters() if p.requires_grad]

    def sums(batches: Any) -> Tensor:
        """Sums of the divergence, of both cross entropies, and of targets."""
        total = torch.zeros(4)
        for batch in batches:
            for ids, labels in documents(*map(torch.from_numpy, batch[:2]), batch[2]):
                whole = F.pad(labels[:, :-1], (1, 0), value=IGNORE_INDEX)  # aligned with the ids again
                losses = [
                    F.cross_entropy(m(input_ids=ids).logits.flatten(0, 1), labels.flatten(), reduction="sum")
                    for m in (student, teacher)
                ]
                values = plain_divergence(student, teacher, ids, whole, measure)
                total = total + torch.stack(
                    [values.sum(), *(x.detach() for x in losses), (labels != IGNORE_INDEX).sum()]
                )
        return total

    found: Run = {"steps": []}
    for step, batches in enumerate(ours["batches"][:STEPS]):
        total = sums(batches)
        means = total[:3] / total[3]
        means[0].backward()
        norm = torch.stack([p.grad.norm() for p in trained if p.grad is not None]).norm()
        found["steps"].append((*means.tolist(), norm.item()))
        with torch.no_grad():
            for p in trained:
                p -= rate * (1 - step / STEPS) * (0 if p.grad is None else p.grad)
                p.grad = None
    with torch.no_grad():
        total = sums(ours["batches"][STEPS])
    found["evaluation"] = (total[:3] / total[3]).tolist()
    named = {key.removeprefix(prefix): p for key, p in student.named_parameters() if p.requires_grad}
    found["weights"] = {key: p.detach().numpy().copy() for key, p in named.items()}
    return found


class Runs:
    """Runs of a module's tests, made when a test first needs them."""

    def __init__(self, files: Path) -> None:
        self.files = files
        self._found: dict[tuple[str, int], list[Run]] = {}
        self._plain: dict[str, Run] = {}

    def ours(self, name: str, world: int, resumed: bool = False) -> Run:
        if world == 2 and name in RESUMED:
            self.ours(name, 1)  # which saves
        if (name, world) not in self._found:
            self._found[name, world] = spawn(world, train_case, self.files, name)[0]
        return self._found[name, world][resumed]

    def plain(self, name: str, world: int) -> Run:
        if name not in self._plain:
            self._plain[name] = spawn(1, plain_run, self.files, name, self.ours(name, world))[0]
        return self._plain[name]


@pytest.fixture(scope="module")
def runs(files: Path) -> Runs:
    return Runs(files)


QUICK = {("packed", 2)}
EVERY = [(name, world) for name in CASES for world in (1, 2, 3)]


@pytest.mark.compat
@pytest.mark.parametrize(
    ("name", "world"), [x if x in QUICK else pytest.param(*x, marks=pytest.mark.slow) for x in EVERY]
)
def test_losses_metrics_and_weights_equal_plain_transformers(runs: Runs, name: str, world: int) -> None:
    ours, theirs = runs.ours(name, world), runs.plain(name, world)
    assert ours["teacher_stayed"] and ours["noted_passes"] == 0
    names = ("loss", "cross_entropy", "teacher_cross_entropy", "grad_norm")
    for record, wanted in zip(steps(ours), theirs["steps"], strict=True):
        assert [record[key] for key in names] == pytest.approx(wanted, rel=2e-5)
    (evaluation,) = (record for record in ours["records"] if "eval_loss" in record)
    assert [evaluation[f"eval_{key}"] for key in names[:3]] == pytest.approx(theirs["evaluation"], rel=1e-5)
    assert any(not np.array_equal(before, ours["weights"][key]) for key, before in ours["before"].items())
    assert ours["weights"].keys() == theirs["weights"].keys()
    for key, weight in theirs["weights"].items():
        assert np.linalg.norm(ours["weights"][key] - weight) <= 1e-5 * np.linalg.norm(weight), key


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
def test_a_run_resumed_on_more_ranks_goes_on_with_its_teacher(runs: Runs, name: str) -> None:
    resumed, whole = runs.ours(name, 2, resumed=True), runs.ours(name, 1)
    (last,) = steps(resumed)
    assert last["step"] == STEPS and last["loss"] == pytest.approx(steps(whole)[-1]["loss"], rel=1e-5)
    for key, weight in whole["weights"].items():
        assert np.linalg.norm(resumed["weights"][key] - weight) <= 1e-5 * np.linalg.norm(weight), key


@pytest.mark.slow
def test_a_run_does_not_resume_with_another_teacher(runs: Runs) -> None:
    runs.ours("adapters", 1)
    checkpoint = runs.files / "adapters-1" / "checkpoint-2"
    respelled = parse(words_of(runs.files, "adapters", "o", f"--teacher {runs.files}/./teacher/").split(), "test")
    assert check_flags(checkpoint, respelled) == ()
    warmer = parse(words_of(runs.files, "adapters", "o", "--distill_temperature 3").split(), "test")
    assert check_flags(checkpoint, warmer) == ("resumed with --distill_temperature 3.0 (was 1.0)",)
    other = parse(words_of(runs.files, "adapters", "o", "--teacher elsewhere").split(), "test")
    with pytest.raises(ValueError, match=r"learned from --teacher .*/teacher, not from elsewhere; give --teacher "):
        check_flags(checkpoint, other)


# ---- refusals and the plan -------------------------------------------------------------------------------------------


def test_wrong_teachers_are_refused_in_one_line_before_anything_starts(files: Path, tmp_path: Path) -> None:
    words = words_of(files, "llama", "refused")
    gemma = plain_model(tiny_config("gemma2"))
    gemma.save_pretrained(tmp_path / "gemma")
    (tmp_path / "empty").mkdir()
    for more, line in (
        ("--teacher nowhere/at/all", "--teacher nowhere/at/all"),
        (f"--teacher {tmp_path}/empty", f"--teacher {tmp_path}/empty is a directory without config.json"),
        ("--teacher llama3-8b", "--teacher llama3-8b is a preset, which has no weights; give a directory"),
        (f"--teacher {files}/larger", "has a vocabulary of 72 tokens, but --model_name_or_path .* one of 64; give a"),
        (f"--teacher {tmp_path}/gemma", "has sliding windows, which not every schedule supports; add --sch"),
        ("--model_max_length 100000000 --objective next_token", "--teacher .* applies to --objective distill"),
        ("--distill_temperature 0", "--distill_temperature 0"),
        ("--distill_kind jsd --distill_beta 1", "--distill_beta 1.0: give a number above 0 and below 1"),
        ("--distill_kind forward --distill_beta 0.3", "--distill_beta 0.3 applies to --distill_kind jsd, not forward;"),
        ("--beta 0.3", "--beta 0.3 applies to --objective dpo, not distill; leave it out"),
        ("--deepspeed d.json", "--deepspeed d.json does not work with --objective distill; leave it out"),
    ):
        end = alone(f"{words} {more}")
        assert end.status == 2 and len(end.err.strip().splitlines()) == 1, (more, end)
        assert re.search(line, end.err), (line, end.err)
    end = alone(words.replace(f"--teacher {files}/teacher ", ""))
    assert end.status == 2 and "--objective distill needs a teacher; add --teacher" in end.err
    assert not (files / "refused").exists()


def test_a_teacher_with_another_tokenizer_is_refused(files: Path, tmp_path: Path) -> None:
    for folder, words in (("ours", "<1> <2> <3>"), ("other", "<1> <3> <2>")):
        vocabulary = {word: i for i, word in enumerate(words.split())}
        made = Tokenizer(WordLevel(vocabulary, unk_token="<1>"))
        made.pre_tokenizer = WhitespaceSplit()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<1>")
        for kind in ("llama", "teacher"):
            target = tmp_path / folder / kind
            shutil.copytree(files / kind, target)
            tokenizer.save_pretrained(target)
    words_of_pair = f"--model_name_or_path {tmp_path}/ours/llama --teacher {tmp_path}"
    words = words_of(files, "llama", "refused")
    end = alone(f"{words} {words_of_pair}/other/teacher")
    line = f"--teacher {tmp_path}/other/teacher has another tokenizer than {tmp_path}/ours/llama, so its tokens mean"
    assert end.status == 2 and line in end.err and len(end.err.strip().splitlines()) == 1
    end = alone(f"{words} {words_of_pair}/ours/teacher --max_steps 1 --output_dir {tmp_path}/run")
    assert end.status == 0, end.err
    assert "distill, reverse, temperature 2, teacher: " in end.out


@pytest.mark.slow
def test_the_plan_counts_the_teacher() -> None:
    student, teacher = preset_config(BOTH, "llama3.2-1b"), preset_config(BOTH, "llama3-8b")
    words = "--bf16 --model_max_length 64K --remat attention --offload none --objective"
    alone = planned_run(student, f"{words} next_token", 8)
    beside = replace(planned_run(student, f"{words} distill --teacher t", 8), teacher=teacher)
    plans = plan_as_given(alone), plan_as_given(beside)
    assert plans[1].parts.parameters - plans[0].parts.parameters == pytest.approx(
        2 * total_parameters(teacher) / 8, rel=1e-3
    )
    of_teacher = plan_as_given(replace(alone, model=teacher)).seconds
    forward = sum(seconds for part, seconds in of_teacher.items() if part in ("matrix products", "attention")) / 4
    assert 0.8 * forward < plans[1].seconds["teacher"] < 1.6 * forward
    assert plans[1].step_seconds > plans[0].step_seconds + 0.8 * forward
    on_host = replace(beside, state_offloaded=True)
    assert state_bytes_on_host(on_host) - state_bytes_on_host(replace(alone, state_offloaded=True)) == pytest.approx(
        2 * total_parameters(teacher) / 8, rel=1e-3
    )
    with pytest.raises(ValueError, match=r"hf\.plan_memory does not count a teacher; run `lightseq plan"):
        hf.plan_memory(student, 1024, beside.hardware, bf16=True, objective="distill", teacher="t")
