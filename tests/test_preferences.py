"""Training on preferences (DPO): the same losses, metrics and weights as TRL's DPOTrainer on one process."""

import json
import math
import pickle
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from byte_level import CHATML, byte_level, open_path, published, read_rows, write_rows
from test_plan_training import planned_run
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM
from worlds import spawn

from lightseq.architecture.family import preset_config
from lightseq.architecture.flops import total_parameters
from lightseq.checkpoint.resume import ResumePoint, check_flags
from lightseq.cli import BOTH
from lightseq.config.choices import CHOICES
from lightseq.config.command_line import parse
from lightseq.config.train_config import TrainConfig
from lightseq.data.batches import permutation
from lightseq.data.held_out import hold_out
from lightseq.data.packing import PackedExamples, open_packed, open_windows_to_pack, pack
from lightseq.data.sources import ReadOptions
from lightseq.distributed.parallel_dims import whole_tensor
from lightseq.distributed.world import World
from lightseq.models.presets import LLAMA3
from lightseq.objectives.registry import OBJECTIVES, objective_of
from lightseq.plan.plan import Plan, plan_as_given
from lightseq.training.build import build_engine
from lightseq.training.inputs import prepare
from lightseq.training.loop import TrainingLoop
from lightseq.training.metrics import MetricsFile, read_records
from lightseq.training.trainer import Trainer
from lightseq.utils.tensors import IGNORE_INDEX

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": False}
LENGTH, STEPS, BETA, ROWS = 96, 3, 0.3, 2
# Two pairs fill a row, and two rows an update. Prompts and answers differ in length.
PAIRS = [(10 + i % 4, 8 + i % 3, 5 + (5 * i) % 7) for i in range(12)]
TARGETS = ["q_proj", "v_proj", "down_proj"]
CASES = {  # flags, and the learning rate
    "full": ("", 0.05),
    "lora": (f"--lora_rank 4 --lora_alpha 8 --lora_target_modules {','.join(TARGETS)}", 0.5),
}
METRICS = objective_of(TrainConfig(objective="dpo", packing="best_fit")).metrics
Run = dict[str, Any]


def write_inputs(folder: Path, model: Any = None) -> Path:
    """Writes a model with its tokenizer of words, and pairs."""
    torch.manual_seed(0)
    (model or LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=64))).save_pretrained(folder / "model")
    words = Tokenizer(WordLevel({f"<{i}>": i for i in range(64)}, unk_token="<1>"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<0>", eos_token="<2>")
    tokenizer.save_pretrained(folder / "model")
    text = partial(draw_text, np.random.default_rng(0))
    write_rows(
        folder / "pairs.jsonl",
        *(dict(zip(("prompt", "chosen", "rejected"), map(text, sizes), strict=True)) for sizes in PAIRS),
    )
    return folder


def draw_text(draw: np.random.Generator, count: int) -> str:
    return "".join(f"<{i}> " for i in draw.integers(3, 64, count))


def words_of(files: Path, output: str, more: str = "") -> str:
    return (
        f"--model_name_or_path {files}/model --data_path {files}/pairs.jsonl --output_dir {files}/{output} "
        f"--model_max_length {LENGTH} --objective dpo --beta {BETA} --max_steps {STEPS} --optim sgd --max_grad_norm 0 "
        f"--gradient_accumulation_steps {ROWS} --data_cache {files}/cache --save_strategy no "
        f"--eval_data_path {files}/pairs.jsonl --eval_strategy steps --eval_steps {STEPS} {more}"
    )


def make_trainer(rank: int, words: str, resume_from: Path | None = None) -> Trainer:
    config, size = parse(words.split(), "test"), dist.get_world_size()
    world = World(rank, size, rank, size, torch.device("cpu"))
    inputs = prepare(config, LLAMA3, world, ResumePoint(resume_from))
    return Trainer(config, inputs, world, build_engine(config, inputs, world))


def whole_weights(trainer: Trainer) -> dict[str, np.ndarray]:
    parameters = trainer.model.named_parameters()
    return {name: whole_tensor(p.detach()).numpy().copy() for name, p in parameters if p.requires_grad}


def noted_passes(model: Any) -> int:
    """Returns how many units FSDP2 remembers of forward passes, for a backward pass."""
    return len(model._get_fsdp_state()._comm_ctx.post_forward_order)


def train(rank: int, words: str, resume_from: Path | None = None) -> Run:
    """Trains, and returns the records and the weights before and after."""
    trainer = make_trainer(rank, words, resume_from)
    before = whole_weights(trainer)
    trainer.output_dir.mkdir(exist_ok=True)
    metrics = MetricsFile(trainer.output_dir, trainer.first_step) if rank == 0 else None
    TrainingLoop(trainer, metrics).run()
    examples = trainer.inputs.stream.examples
    assert isinstance(examples, PackedExamples)
    order = permutation(len(examples), trainer.config.seed, 0)
    documents = [examples.order[examples.offsets[row] : examples.offsets[row + 1]] for row in order]
    return {
        "records": read_records(metrics.path) if metrics is not None else [],
        "before": before,
        "weights": whole_weights(trainer),
        "noted_passes": sum(map(noted_passes, trainer.models.frozen.values())),
        "pairs": [int(document) // 2 for row in documents for document in row[::2]],
    }


def train_case(rank: int, files: Path, name: str) -> list[Run]:
    """Trains on this many ranks: on one the run saves after two steps, and on two a run resumes from there."""
    (flags, rate), size = CASES[name], dist.get_world_size()
    words = words_of(files, f"{name}-{size}", f"{flags} --learning_rate {rate}")
    if size == 1:
        return [train(rank, f"{words} --save_strategy steps --save_steps 2")]
    found = [train(rank, words)]
    if size == 2:
        resumed = words_of(files, f"{name}-resumed", f"{flags} --learning_rate {rate}")
        found.append(train(rank, resumed, files / f"{name}-1" / "checkpoint-2"))
    return found


def train_by_trl(_rank: int, files: Path, name: str, ours: Run) -> Run:
    """Trains on the same pairs in the same order, and from the same adapters."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    class Recorded(DPOTrainer):  # type: ignore[misc]
        losses: list[float] = []  # noqa: RUF012

        def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(model, *args, **kwargs)
            if model.training:
                self.losses.append(loss.item())
            return loss

        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return torch.utils.data.SequentialSampler(dataset if dataset is not None else self.train_dataset)

    rows = [json.loads(line) for line in (files / "pairs.jsonl").read_text().splitlines()]
    flags, rate = CASES[name]
    arguments = DPOConfig(
        str(files / f"trl-{name}"), use_cpu=True, bf16=False, report_to="none", disable_tqdm=True, beta=BETA,
        optim="sgd", learning_rate=rate, max_grad_norm=0.0, max_steps=STEPS, logging_steps=1, save_strategy="no",
        per_device_train_batch_size=2 * ROWS, per_device_eval_batch_size=4, gradient_checkpointing=False,
        max_length=None,
    )  # fmt: skip
    adapters = LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, task_type="CAUSAL_LM") if flags else None
    trainer = Recorded(
        LlamaForCausalLM.from_pretrained(files / "model"), args=arguments, peft_config=adapters,
        train_dataset=Dataset.from_list([rows[i] for i in ours["pairs"]]), eval_dataset=Dataset.from_list(rows),
        ref_model=None if flags else LlamaForCausalLM.from_pretrained(files / "model"),
        processing_class=AutoTokenizer.from_pretrained(files / "model"),
    )  # fmt: skip
    prefix = "base_model.model." if flags else ""
    if flags:
        begun = {prefix + name: torch.from_numpy(x) for name, x in ours["before"].items()}
        assert not trainer.model.load_state_dict(begun, strict=False).unexpected_keys
    trainer.train()
    trained = trainer.model.named_parameters()
    return {
        "losses": trainer.losses,
        "history": [record for record in trainer.state.log_history if "loss" in record],
        "evaluation": trainer.evaluate(),
        "weights": {name.removeprefix(prefix): p.detach().numpy().copy() for name, p in trained if p.requires_grad},
    }


class Runs:
    """Runs of a module's tests, made when a test first needs them."""

    def __init__(self, files: Path) -> None:
        self.files = write_inputs(files)
        self._found: dict[tuple[str, int], list[Run]] = {}
        self._trl: dict[str, Run] = {}

    def ours(self, name: str, world: int, resumed: bool = False) -> Run:
        if (name, world) not in self._found:
            if world == 2:
                self.ours(name, 1)  # which saves
            self._found[name, world] = spawn(world, train_case, self.files, name)[0]
        return self._found[name, world][resumed]

    def trl(self, name: str) -> Run:
        if name not in self._trl:
            self._trl[name] = spawn(1, train_by_trl, self.files, name, self.ours(name, 1))[0]
        return self._trl[name]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    pytest.importorskip("trl")
    return Runs(tmp_path_factory.mktemp("preferences"))


def cases(worlds: Sequence[int]) -> list[Any]:
    """Returns the cases on numbers of ranks. Quick ones are full fine-tuning on two, and the others on one."""
    quick = {(name, 1) for name in CASES if name != "full"} | {("full", 2)}
    every = [(name, world) for world in worlds for name in CASES]
    return [case if case in quick else pytest.param(*case, marks=pytest.mark.slow) for case in every]


def steps(run: Run) -> list[dict[str, Any]]:
    return [record for record in run["records"] if "loss" in record]


def assert_weights_equal(got: Run, wanted: Run) -> None:
    assert got["weights"].keys() == wanted["weights"].keys()
    for name, weight in wanted["weights"].items():
        assert np.linalg.norm(got["weights"][name] - weight) <= 1e-5 * np.linalg.norm(weight), name


@pytest.mark.compat
@pytest.mark.parametrize(("name", "world"), cases([1, 2, 3]))
def test_losses_metrics_and_weights_equal_those_of_trl_on_one_process(runs: Runs, name: str, world: int) -> None:
    ours, theirs = runs.ours(name, world), runs.trl(name)
    assert ours["noted_passes"] == 0
    assert [record["loss"] for record in steps(ours)] == pytest.approx(theirs["losses"], rel=1e-5)
    for record, logged in zip(steps(ours), theirs["history"], strict=True):
        for metric in METRICS:
            assert record[metric] == pytest.approx(logged[metric], rel=1e-5, abs=1e-5), metric
        assert record["grad_norm"] == pytest.approx(logged["grad_norm"], rel=1e-4)
    (evaluation,) = (record for record in ours["records"] if "eval_loss" in record)
    for metric in ("eval_loss", *(f"eval_{metric}" for metric in METRICS)):
        assert evaluation[metric] == pytest.approx(theirs["evaluation"][metric], rel=1e-5, abs=1e-5), metric
    assert_weights_equal(ours, theirs)


@pytest.mark.parametrize(("name", "world"), cases([2]))
def test_a_run_resumed_on_more_ranks_compares_with_the_same_reference(runs: Runs, name: str, world: int) -> None:
    resumed, whole = runs.ours(name, world, resumed=True), runs.ours(name, 1)
    (last,) = steps(resumed)
    assert last["step"] == STEPS
    for metric in ("loss", *METRICS):
        assert last[metric] == pytest.approx(steps(whole)[-1][metric], rel=1e-5, abs=1e-6), metric
    assert_weights_equal(resumed, whole)


def test_a_run_does_not_resume_beside_another_reference(runs: Runs) -> None:
    runs.ours("full", 1)
    checkpoint = runs.files / "full-1" / "checkpoint-2"
    assert check_flags(checkpoint, parse(words_of(runs.files, "o").split(), "test")) != ()
    respelled = parse(words_of(runs.files, "o", f"--model_name_or_path {runs.files}/./model/").split(), "test")
    assert check_flags(checkpoint, respelled) != ()
    other = parse(words_of(runs.files, "o", "--model_name_or_path elsewhere").split(), "test")
    with pytest.raises(
        ValueError, match=rf"weights of {runs.files}/model, not of elsewhere; give --model_name_or_path"
    ):
        check_flags(checkpoint, other)


# ---- rows ------------------------------------------------------------------------------------------------------------

ASKED, GOOD, BAD = ({"role": role, "content": text} for role, text in
                    (("user", "Sky?"), ("assistant", "Blue."), ("assistant", "Bluish green.")))  # fmt: skip
SEARCH = {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}
# The generation prompt holds a thought, and a chat does not: targets begin before it.
THINKING = CHATML.replace("assistant\n{% endif %}", "assistant\n<think></think>{% endif %}")
READ_ALIKE = {
    "text": ({"prompt": "The sky is", "chosen": " blue.", "rejected": " green or so."}, None),
    "text that ends": ({"prompt": "The sky is", "chosen": " blue.<eos>", "rejected": " green."}, None),
    "text without a prompt": ({"chosen": "The sky is blue.", "rejected": "The sky is green or so."}, None),
    "turns": ({"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]}, CHATML),
    "turns without a prompt": ({"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD], "score_chosen": 8.0}, CHATML),
    "functions": ({"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD], "tools": [SEARCH]}, CHATML),
    "a prompt that no answer follows": ({"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]}, THINKING),
    "a template that thinks": (
        {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD], "chat_template_kwargs": {"enable_thinking": False}},
        "qwen3",
    ),
}


def read_by_trl(folder: Path, row: dict[str, Any], template: str | None) -> list[tuple[list[int], list[bool]]]:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, "vocab_size": 300}, intermediate_size=8))
    arguments = DPOConfig(str(folder), use_cpu=True, bf16=False, report_to="none", max_length=None)
    data, tokenizer = Dataset.from_list([row]), byte_level(template).backend
    reference = LlamaForCausalLM(model.config)
    trainer = DPOTrainer(model, reference, arguments, train_dataset=data, processing_class=tokenizer)
    found = trainer.train_dataset[0]
    prompt = found["prompt_ids"]
    answers = [found[f"{name}_ids"] for name in ("chosen", "rejected")]
    return [([*prompt, *answer], [False] * len(prompt) + [True] * len(answer)) for answer in answers]


@pytest.mark.compat
@pytest.mark.usefixtures("rendered_here")
@pytest.mark.parametrize("case", READ_ALIKE)
def test_pairs_are_tokenized_as_by_trl(case: str, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    row, template = READ_ALIKE[case]
    template = published(template) if template is not None and "{" not in template else template
    found = read_rows(tmp_path, byte_level(template), row, pairs=True)
    assert [(document.ids, document.mask) for document in found] == read_by_trl(tmp_path, row, template)


def test_bytes_are_pairs_too_and_end_with_the_end_of_a_document(tmp_path: Path) -> None:
    from lightseq.data.tokenizer import ByteTokenizer

    path = write_rows(tmp_path / "rows.jsonl", {"prompt": "ab", "chosen": "cd", "rejected": "ce"})
    source = open_path(path, ByteTokenizer(), pairs=True).source
    assert [source.document(i).tolist() for i in range(2)] == [[97, 98, 99, 100, 256], [97, 98, 99, 101, 256]]
    assert [source.targets_of(i).tolist() for i in range(2)] == [[False, False, True, True, True]] * 2


PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
REFUSED_ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown column": ({**PAIR, "weird": 1}, "'weird' is not known beside prompt"),
    "label": ({**PAIR, "label": 1}, "'label' is not known beside prompt"),
    "other rows": ({"text": "a"}, "has no column 'chosen' for --objective dpo; it has: text"),
    "text and turns": ({**PAIR, "chosen": [ASKED, GOOD], "rejected": [BAD]}, "'prompt' is not a list of turns"),
    "no shared prompt": ({"chosen": "ab", "rejected": "cd"}, "do not begin with the same prompt"),
    "tools for text": ({**PAIR, "tools": [SEARCH]}, "'tools' needs a prompt and answers that are turns"),
    "another chat": (
        {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD], "messages": [GOOD, {**ASKED, "content": "Other?"}]},
        "column 'messages' differs from prompt and chosen and rejected",
    ),
}


@pytest.mark.parametrize("case", REFUSED_ROWS)
def test_rows_that_are_no_pairs_are_refused_by_name(case: str, tmp_path: Path) -> None:
    row, line = REFUSED_ROWS[case]
    with pytest.raises(ValueError, match=r"^[^\n]*$") as refused:
        read_rows(tmp_path, byte_level(CHATML), row, pairs=True)
    assert line in str(refused.value)


def test_a_chat_template_for_text_and_data_without_rows_are_refused(tmp_path: Path) -> None:
    tokenizer = replace(byte_level(CHATML), template_replaced=True)
    with pytest.raises(ValueError, match=r"--chat_template applies to turns, but .* holds text; leave it out"):
        read_rows(tmp_path, tokenizer, PAIR, pairs=True)
    tokens = open_path(write_rows(tmp_path / "rows.jsonl", PAIR), byte_level(None), pairs=True).source.path
    pickled = tmp_path / "rows.pkl"
    pickled.write_bytes(pickle.dumps([PAIR]))
    for path in (tokens, pickled):
        with pytest.raises(
            ValueError, match=r"holds no rows, which --objective dpo needs; .* rows of \.jsonl or \.parquet$"
        ):
            open_packed(path, 64, 300, read_options=ReadOptions(pairs=True))
    with pytest.raises(ValueError, match="holds preferences, which only lightseq train --objective dpo reads"):
        open_packed(tokens, 64, 300)


def test_pairs_without_their_objective_are_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'chosen' holds preferences, which only lightseq train --objective dpo reads"):
        read_rows(tmp_path, byte_level(CHATML), PAIR)


# ---- packing ---------------------------------------------------------------------------------------------------------


def to_pack(tmp_path: Path, length: int, sizes: Sequence[int]) -> tuple[Any, ...]:
    """Writes pairs with prompts of these sizes. Returns the arguments of `open_packed`."""
    rows = [{"prompt": "p" * n, "chosen": "c" * (n % 3 + 1), "rejected": "r"} for n in sizes]
    path = write_rows(tmp_path / "rows.jsonl", *rows)
    options = ReadOptions(pairs=True, cache=tmp_path / "cache")
    return path, length, 300, byte_level(None), False, True, options


def documents_of(examples: PackedExamples) -> list[list[list[int]]]:
    """Returns the ids of every document of every row."""
    found = []
    for example in (examples[i] for i in range(len(examples))):
        assert example.boundaries is not None
        edges = [*pairwise(example.boundaries)]
        assert all(example.labels[end - 1] == IGNORE_INDEX for _, end in edges), "no target crosses documents"
        found.append([example.input_ids[start:end].tolist() for start, end in edges])
    return found


def test_the_documents_of_a_pair_stand_side_by_side_in_one_row(tmp_path: Path) -> None:
    rows = documents_of(open_packed(*to_pack(tmp_path, 64, [3, 20, 7, 26, 11, 5, 16])))
    assert sum(len(row) for row in rows) == 14 and max(len(row) for row in rows) > 2
    for row in rows:
        assert len(row) % 2 == 0 and sum(map(len, row)) <= 64
        for chosen, rejected in zip(row[::2], row[1::2], strict=True):
            size = len(rejected) - 2  # the answer is one byte, and the end
            assert chosen[:size] == rejected[:size] and len(chosen) == size + size % 3 + 2


def test_pairs_longer_than_a_row_are_refused_with_the_length_that_they_need(tmp_path: Path) -> None:
    line = r"2 of 4 pairs have more than the 40 tokens of .*; give --model_max_length 64, or remove them$"
    with pytest.raises(ValueError, match=line):
        open_packed(*to_pack(tmp_path, 40, [3, 20, 30, 5]))


def test_whole_pairs_are_held_out(tmp_path: Path) -> None:
    given = to_pack(tmp_path, 64, range(3, 13))
    kept, held = (pack(given[0], part) for part in hold_out(open_windows_to_pack(*given), 0.25, 1, given[0]))
    assert "held out 3 of 10 pairs" in "".join(kept.notes)
    first, second = (
        [len(rejected) - 2 for row in documents_of(part) for rejected in row[1::2]] for part in (kept, held)
    )
    assert len(second) == 3 and sorted(first + second) == [*range(3, 13)]


# ---- flags, plan and router loss -------------------------------------------------------------------------------------

REFUSED_FLAGS = {
    "--packing none": "--objective dpo packs both answers of a pair into one row, but --packing is none; give best_fit",
    "--deepspeed zero.json": "--deepspeed zero.json does not work with --objective dpo; leave it out",
    "--lazy_preprocess True": "--lazy_preprocess True does not work with --objective dpo; leave it out",
    "--lora_rank 4 --lora_adapter before": "--lora_adapter before does not work with --objective dpo, which compares",
    "--beta 0": "--beta 0.0: give a number above 0",
    "--objective next_token --beta 0.2": "--beta 0.2 applies to --objective dpo, not next_token; leave it out",
    "--objective ppo": "--objective 'ppo' is unknown; choose from next_token, dpo",
    "--loss_type ipo": "unknown flag --loss_type; --objective dpo has TRL's sigmoid loss; for others use TRL's",
}


@pytest.mark.parametrize("flags", REFUSED_FLAGS)
def test_flags_that_exclude_dpo_are_refused(flags: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]*$") as refused:
        parse(f"--model_name_or_path m --data_path d --output_dir o --objective dpo {flags}".split(), "test")
    assert str(refused.value).startswith(REFUSED_FLAGS[flags])


def test_run_json_repeats_the_objective_and_its_packing(tmp_path: Path) -> None:
    words = "--model_name_or_path m --data_path d --output_dir o --objective dpo --beta 0.4"
    config = parse(words.split(), "test")
    (tmp_path / "run.json").write_text(json.dumps({"config": config.to_json()}))
    assert parse(["--config", str(tmp_path / "run.json")], "test") == config
    assert (config.objective, config.beta, config.packing) == ("dpo", 0.4, "best_fit")
    assert tuple(OBJECTIVES) == CHOICES["objective"]


def test_the_plan_counts_a_second_model_and_a_second_forward_pass_where_there_are_any() -> None:
    model, words = preset_config(BOTH, "llama3-8b"), "--bf16 --packing best_fit --torch_compile --remat attention"

    def planned(flags: str) -> Plan:
        return plan_as_given(planned_run(model, f"{words} --offload none {flags}", 8))

    weights = 2 * math.ceil(total_parameters(model) / 8)
    for adapters, copies, most in (("", 1, 0.5), ("--lora_rank 16", 0, 0.55)):  # frozen weights reduce no gradients
        plain, paired = planned(adapters), planned(f"{adapters} --objective dpo")
        assert paired.parts.parameters - plain.parts.parameters == pytest.approx(copies * weights, rel=1e-6)
        assert paired.parts.optimizer == plain.parts.optimizer and paired.parts.gradients == plain.parts.gradients
        passes = paired.seconds["passes without gradients"]
        assert 0.15 < passes / plain.step_seconds < most and "passes without gradients" not in plain.seconds
        more = paired.step_seconds - plain.step_seconds
        assert passes * (1 - 1e-9) <= more < 1.2 * passes


def with_experts(rank: int, files: Path) -> list[dict[str, Any]]:
    words = words_of(files, f"experts-{dist.get_world_size()}", "--router_aux_loss_coef 0.5 --learning_rate 0.05")
    return steps(train(rank, words))


@pytest.mark.slow
def test_the_router_loss_joins_preferences_and_leaves_their_own_loss(tmp_path: Path) -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8}
    write_inputs(tmp_path, Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **sizes)))
    one, two = (spawn(world, with_experts, tmp_path)[0] for world in (1, 2))
    assert one[0]["loss"] == pytest.approx(math.log(2), rel=1e-6) and one[0]["router_loss"] > 0.9
    for alone, shared in zip(one, two, strict=True):
        for metric in ("loss", "router_loss", *METRICS):
            assert shared[metric] == pytest.approx(alone[metric], rel=1e-5, abs=1e-6), metric
        assert shared["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-4)
