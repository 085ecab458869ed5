"""Evaluations across ranks equal plain transformers on one process: loss by position, and retrieval of needles."""

import contextlib
import json
import math
import pickle
import re
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import forked
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from programs import Ended, captured
from transformers import LlamaConfig, LlamaForCausalLM
from worlds import spawn

from lightseq.cli import BOTH
from lightseq.config.train_config import TrainConfig
from lightseq.data.load_tokenizer import load_tokenizer
from lightseq.data.open_examples import open_examples
from lightseq.data.sources import ReadOptions
from lightseq.data.token_directory import write_token_directory
from lightseq.data.tokenizer import ByteTokenizer
from lightseq.distributed.world import World
from lightseq.objectives.next_token import bin_starts, perplexity
from lightseq.tools.evaluate import command, evaluate
from lightseq.tools.evaluate.needle import FILLER, QUESTION, SENTENCE, IdNeedles, Search, TextNeedles, make_search
from lightseq.tools.evaluate.retrieval import haystack
from lightseq.training.optimization import LearningRate
from lightseq.utils import progress
from lightseq.utils.formatting import four_significant_digits

ROOT = Path(__file__).resolve().parent.parent
LENGTH, VOCABULARY = 61, 64  # a length that divides by no number of chunks
SIZES = (150, 2, 61, 62, 1, 40)
CONFIG = LlamaConfig(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=2048,
)  # fmt: skip


def evaluation(rank: int, words: str) -> Ended:
    """One evaluation on this rank, in the process group that the test has joined already."""
    size = dist.get_world_size()
    world = World(rank, size, rank, size, torch.device("cpu"))
    evaluate.init_distributed = lambda timeout_seconds: contextlib.nullcontext(world)  # type: ignore[assignment]
    end = captured(lambda: command.main(BOTH, words.split()))
    dist.barrier()
    return end


def evaluations(rank: int, runs: list[str]) -> list[Ended]:
    return [evaluation(rank, words) for words in runs]


class Files(NamedTuple):
    """Models and data, and where evaluations may write."""

    root: Path

    def words(self, name: str, flags: str, model: str = "model") -> str:
        return f"--model_name_or_path {self.root / model} --output_dir {self.root / name} {flags}"

    def records(self, name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        lines = (self.root / name / evaluate.RECORD).read_text().splitlines()
        summary, *rows = [json.loads(line) for line in lines]
        return summary, rows


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    root = tmp_path_factory.mktemp("evaluate")
    torch.manual_seed(0)
    with torch.no_grad():
        for name, size in (("model", VOCABULARY), ("bytes", 257)):
            model = LlamaForCausalLM(LlamaConfig(**CONFIG.to_dict() | {"vocab_size": size}))
            for parameter in model.parameters():
                parameter.mul_(3)  # so that what is predicted differs from place to place
            model.save_pretrained(root / name)
    finder().save_pretrained(root / "finder")
    text = {"text": "It was a bright cold day in April, and the clocks were striking thirteen. " * 6}
    (root / "text.jsonl").write_text(json.dumps(text) + "\n")
    write_token_directory(root / "data", documents(), VOCABULARY, dict)
    return Files(root)


def documents() -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    return [rng.integers(0, VOCABULARY, size) for size in SIZES]


MORE = "--max_eval_samples 1000"  # than there are
LOSS = {
    "powers": "--bins powers --schedule zigzag --per_device_eval_batch_size 2",
    "equal": "--bins 5 --schedule striped",
    "groups": "--schedule ring --sequence_parallel_size {half} --per_device_eval_batch_size 2",
}
TWO_GROUPS = (2, 4)  # numbers of ranks that two groups share, each with sequences of its own
DEPTHS, LENGTHS, TRIALS, CHOICES = (0.0, 0.4, 1.0), (37, 61), 3, 4
LONGER = (300, 331)  # for a needle of bytes
NEEDLE = {  # name, model, flags
    "found": ("finder", "--schedule zigzag --per_device_eval_batch_size 8"),
    "guessed": ("model", "--schedule striped --per_device_eval_batch_size 5"),
    "bytes": (
        "bytes",
        "--tokenizer byte --data_path {root}/text.jsonl --data_cache {root}/cache --per_device_eval_batch_size 8",
    ),
    "groups-needle": ("finder", "--sequence_parallel_size {half}"),
}


@pytest.fixture(scope="module", params=[2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3, 4))])
def world(request: pytest.FixtureRequest, files: Files) -> int:
    """The number of ranks, on which every evaluation has run."""
    count: int = request.param
    data = f"--data_path {files.root / 'data'} --model_max_length {LENGTH}"
    words = [files.words(f"{name}-{count}", f"{data} {flags.format(half=count // 2)}") for name, flags in LOSS.items()]
    for name, (model, flags) in NEEDLE.items():
        lengths = ",".join(map(str, lengths_of(name)))
        grid = f"--task needle --depths 0,0.4,1 --lengths {lengths} --trials {TRIALS} --choices {CHOICES} --seed 5"
        words.append(files.words(f"{name}-{count}", f"{grid} {flags.format(root=files.root, half=count // 2)}", model))
    words = [line for line in words if "groups" not in line or count in TWO_GROUPS]
    for ends in spawn(count, evaluations, words):
        assert [end.status for end in ends] == [0] * len(words), ends
    return count


def lengths_of(name: str) -> tuple[int, ...]:
    return LONGER if NEEDLE[name][0] == "bytes" else LENGTHS


# ---- loss by position -----------------------------------------------------------------------------------------------


def plain_losses(root: Path) -> tuple[list[int], list[float]]:
    """Position and loss of every target, by nothing but transformers; windows of a document meet without a gap."""
    model = LlamaForCausalLM.from_pretrained(root / "model")
    positions, losses = [], []
    for document in map(torch.from_numpy, documents()):
        for start in range(0, len(document) - 1, LENGTH):
            targets = document[start + 1 : start + LENGTH + 1]
            with torch.no_grad():
                logits = model(document[None, start : start + len(targets)]).logits[0]
            losses += F.cross_entropy(logits, targets, reduction="none").tolist()
            positions += range(len(targets))
    return positions, losses


@pytest.mark.compat
def test_loss_by_position_equals_one_process(files: Files, world: int) -> None:
    positions, losses = (np.array(column) for column in plain_losses(files.root))
    for name in LOSS if world in TWO_GROUPS else ("powers", "equal"):
        summary, bins = files.records(f"{name}-{world}")
        assert summary["valid_tokens"] == len(losses) == sum(size - 1 for size in SIZES)
        assert summary["loss"] == pytest.approx(losses.mean(), rel=1e-5)
        assert summary["perplexity"] == pytest.approx(math.exp(losses.mean()), rel=1e-5)
        assert [b["first"] for b in bins] == list(bin_starts("5" if name == "equal" else "powers", LENGTH))
        for b in bins:
            inside = (positions >= b["first"]) & (positions <= b["last"])
            assert b["valid_tokens"] == inside.sum() > 0
            assert b["loss"] == pytest.approx(losses[inside].mean(), rel=1e-5)
        whole = sum(b["loss"] * b["valid_tokens"] for b in bins)
        assert whole / summary["valid_tokens"] == pytest.approx(summary["loss"], rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["none", "best_fit"])
def test_a_limit_equals_a_file_that_is_cut_to_it(files: Files, tmp_path: Path, packing: str) -> None:
    """The first rows or documents count, also those too short to have a target."""
    tokens, texts = [*documents()[:2], np.array([3]), *documents()[2:]], ["ab", "", "cdefg", "h" * 99, "ijk"]
    for name, count in (("whole", None), ("cut", 3)):
        write_token_directory(tmp_path / f"{name}.tokens", tokens[:count], VOCABULARY, dict)
        sequences = [ids.tolist() for ids in tokens[:count]]
        (tmp_path / f"{name}.pkl").write_bytes(pickle.dumps({"input_ids": sequences}))
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:count]))
    runs = []
    for kind in ("tokens", "pkl", "jsonl"):
        for name, limit in (("whole", ""), ("cut", ""), ("whole", "--max_eval_samples 3"), ("whole", MORE)):
            flags = f"--data_path {tmp_path}/{name}.{kind} --tokenizer byte --data_cache {tmp_path}/cache {limit}"
            runs.append(f"{flags} --model_max_length {LENGTH} --packing {packing} --bins 1")
    lines = [files.words(f"limit-{packing}-{i}", run, "bytes") for i, run in enumerate(runs)]
    assert all(end.status == 0 for ends in spawn(2, evaluations, lines) for end in ends)
    results = [files.records(f"limit-{packing}-{i}")[0] for i in range(len(runs))]
    found = [tuple(result[key] for key in ("loss", "valid_tokens", "sequences")) for result in results]
    for whole, cut, limited, more in (found[i : i + 4] for i in range(0, len(found), 4)):
        assert limited == cut != whole == more


def test_bins_cover_every_position_once() -> None:
    assert bin_starts("powers", 1) == (0,)
    assert bin_starts("powers", 8) == (0, 1, 2, 4) and bin_starts("powers", 9) == (0, 1, 2, 4, 8)
    assert bin_starts("3", 10) == (0, 3, 6)
    for bins in ("0", "11", "-1", "many"):
        with pytest.raises(ValueError, match=f"--bins {bins}: give powers, or a number of equal bins from 1 to 10"):
            bin_starts(bins, 10)


def test_a_perplexity_too_large_for_a_float_is_none() -> None:
    assert perplexity(None) is None and perplexity(1e4) is None
    assert perplexity(2.0) == pytest.approx(math.exp(2))
    values = {124.0: "124.0", 93.265: "93.27", 1.0: "1.000", 1234.4: "1,234", 123456.0: "1.235e+05"}
    assert {value: four_significant_digits(value) for value in values} == values


# ---- needles ---------------------------------------------------------------------------------------------------------


def finder() -> LlamaForCausalLM:
    """Two layers that find by construction: the first tells a token the one before it, the second copies what followed.

    A token is one direction; so is, in other dimensions, the token before it, and what is to come. Queries and keys of
    the first layer are constants, whose rotations agree one token apart; those of the second live in dimensions that
    hardly rotate.
    """
    words, head, fast = VOCABULARY, 2 * VOCABULARY, 8
    config = LlamaConfig(
        vocab_size=words, hidden_size=3 * words + 1, intermediate_size=8, num_hidden_layers=2, num_attention_heads=1,
        num_key_value_heads=1, head_dim=head, tie_word_embeddings=False, max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 1e8},
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    own, before, answer = (slice(i * words, (i + 1) * words) for i in range(3))
    constant = slice(3 * words, 3 * words + 1)
    still = torch.cat([torch.arange(head // 4, head // 2), torch.arange(3 * head // 4, head)])  # a dimension a token
    angles = 1e8 ** (-2 * torch.arange(fast) / head)
    first, second = (layer.self_attn for layer in model.model.layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        model.model.embed_tokens.weight[:, own] = torch.eye(words)
        model.model.embed_tokens.weight[:, constant] = 1.0
        first.k_proj.weight[:fast, constant] = 3.0
        first.q_proj.weight[:fast, constant] = 3 * torch.cos(angles)[:, None]  # the key's, turned back by one token
        first.q_proj.weight[head // 2 : head // 2 + fast, constant] = -3 * torch.sin(angles)[:, None]
        second.q_proj.weight[still, own] = 5 * torch.eye(words)
        second.k_proj.weight[still, before] = 5 * torch.eye(words)
        for attention, place in ((first, before), (second, answer)):
            attention.v_proj.weight[:words, own] = torch.eye(words)
            attention.o_proj.weight[place, :words] = 0.2 * torch.eye(words)
        model.lm_head.weight[:, answer] = 5 * torch.eye(words)
        model.lm_head.weight[:, own] = -5 * torch.eye(words)
    return model


def search_of(root: Path, name: str) -> Search:
    """Returns the search with the texts of the command, which depend on the seed only."""
    lengths = lengths_of(name)
    if name != "bytes":
        return make_search(IdNeedles(VOCABULARY), None, TRIALS, CHOICES, 5, lengths, VOCABULARY)
    options = ReadOptions(cache=root / "cache")
    examples = open_examples(root / "text.jsonl", max(lengths), 257, "byte", False, read_options=options)
    hay = haystack(examples, 4 * max(lengths), (256,))
    return make_search(TextNeedles(ByteTokenizer()), hay, TRIALS, CHOICES, 5, lengths, 257)


def test_a_model_built_to_find_needles_finds_them_at_every_depth_and_length(files: Files, world: int) -> None:
    for name in ("found", *(["groups-needle"] if world in TWO_GROUPS else [])):
        summary, cells = files.records(f"{name}-{world}")
        assert {(c["length"], c["depth"]) for c in cells} == {(a, b) for a in LENGTHS for b in DEPTHS}
        assert summary["accuracy"] == summary["greedy_accuracy"] == 1.0
        assert all(cell["greedy_accuracy"] == 1.0 and cell["margin"] > 1 for cell in cells)


def test_likelihoods_equal_one_process(files: Files, world: int) -> None:
    for name in ("guessed", "bytes"):
        summary, cells = files.records(f"{name}-{world}")
        model, search = LlamaForCausalLM.from_pretrained(files.root / NEEDLE[name][0]), search_of(files.root, name)

        def log_p(text: np.ndarray, answer: np.ndarray, model: Any = model) -> float:
            ids = torch.from_numpy(np.concatenate([text, answer]))[None]
            with torch.no_grad():
                logits = model(ids).logits[0, len(text) - 1 : -1]
            return -F.cross_entropy(logits, torch.from_numpy(answer), reduction="sum").item()

        for cell in cells:
            texts = [search.text(trial, cell["depth"], cell["length"]) for trial in range(TRIALS)]
            pairs = zip(texts, search.needles, strict=True)
            rows = np.array([[log_p(text, answer) for answer in needle.answers] for text, needle in pairs])
            margins = rows[:, 0] - rows[:, 1:].max(1)
            assert cell["log_probability"] == pytest.approx(rows[:, 0].mean(), rel=1e-5)
            assert cell["margin"] == pytest.approx(margins.mean(), rel=1e-5, abs=1e-4)
            assert cell["accuracy"] == (margins > 0).mean()
        assert len(cells) == len(DEPTHS) * 2 and 0 < summary["accuracy"] < 1, "a model that knows nothing guesses"
        assert summary["greedy_accuracy"] < 0.5


def test_a_needle_lies_at_its_depth_and_the_answer_ends_the_text() -> None:
    tokenizer = ByteTokenizer()
    search = make_search(TextNeedles(tokenizer), None, 3, 4, 0, (200, 500), 257)
    for length in (200, 500):
        for depth in (0.0, 0.25, 1.0):
            for trial, needle in enumerate(search.needles):
                text = search.text(trial, depth, length)
                read = tokenizer.decode(text)
                number, size = tokenizer.decode(needle.answers[0]).strip(), len(needle.sentence)
                hay = length - size - len(needle.question) - len(needle.answers[0])
                assert len(text) + len(needle.answers[0]) == length
                assert read.index(f"\nThe pass key is {number}.") == round(depth * hay)
                assert read.endswith("The pass key is") and read.count(number) == 2
    first = search.needles[0]
    assert {len(answer) for answer in first.answers} == {6} and len({tuple(a) for a in first.answers}) == 4


@pytest.mark.parametrize("kind", ["digits in threes", "spaces joined to words"])
def test_numbers_are_tokenized_as_in_a_text(kind: str, tmp_path: Path) -> None:
    """The two ways of Llama 3 and Llama 2; both begin a document with a token of their own."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.BPE())
    alphabet = []
    if kind == "digits in threes":
        split = pre_tokenizers.Split(Regex(r" ?\p{L}+|\p{N}{1,3}|\s+|[^\s\p{L}\p{N}]+"), "isolated")
        words.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
        words.decoder, alphabet = decoders.ByteLevel(), pre_tokenizers.ByteLevel.alphabet()
    else:
        spaces, digits = pre_tokenizers.Metaspace(prepend_scheme="first"), pre_tokenizers.Digits(True)
        words.pre_tokenizer = pre_tokenizers.Sequence([spaces, digits])
        words.decoder = decoders.Metaspace(prepend_scheme="first")
    texts = [f"{SENTENCE}{QUESTION} {number} {FILLER}".format(number=number) for number in range(10_000, 100_000, 91)]
    words.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=500, special_tokens=["<s>"], initial_alphabet=alphabet)
    )
    words.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>").save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))

    search = make_search(TextNeedles(tokenizer), None, 4, 4, 0, (300,), tokenizer.vocab_size)
    for trial, needle in enumerate(search.needles):
        text = search.text(trial, 0.5, 300)
        whole = tokenizer.decode(np.concatenate([text, needle.answers[0]]))
        number = tokenizer.decode(needle.answers[0]).strip()
        assert len(text) + len(needle.answers[0]) == 300
        assert text[0] == 0 and 0 not in text[1:] and number.isdecimal() and int(number) >= 10_000
        assert whole.endswith(f"The pass key is {number}") and f"\nThe pass key is {number}." in whole
        for answer in needle.answers:
            written = tokenizer.encode_part(f"{QUESTION} {tokenizer.decode(answer).strip()}")
            assert np.array_equal(np.concatenate([needle.question, answer]), written), "as it is in a text"
        assert len({len(answer) for answer in needle.answers}) == 1


class Merging(ByteTokenizer):
    """Makes one token of a number and the two words before it."""

    def encode_part(self, text: str) -> np.ndarray:
        words = text.split(" ")
        if words[-1].isdecimal():
            words[-3:] = ["".join(words[-3:])]
        return np.array([zlib.crc32(word.encode()) % 1000 for word in words])


def test_an_answer_may_share_a_token_with_the_question() -> None:
    needle = TextNeedles(Merging()).draw(np.random.default_rng(0), 3)
    assert np.array_equal(needle.question, Merging().encode_part(QUESTION)[:-2])
    assert [len(answer) for answer in needle.answers] == [1, 1, 1]


def test_needles_of_ids_serve_models_without_a_tokenizer() -> None:
    hay = np.arange(VOCABULARY)
    search = make_search(IdNeedles(VOCABULARY), hay, 2, 3, 0, (100,), VOCABULARY)
    for trial, needle in enumerate(search.needles):
        key, value = needle.sentence
        text = search.text(trial, 0.5, 100)
        assert needle.answers[0] == [value] and text[-1] == key == needle.question[0]
        assert [place for place, token in enumerate(text) if token == key] == [48, 98]
        assert not np.isin(np.delete(text, [48, 49, 98]), needle.absent).any(), "no wrong answer in the hay"


# ---- what is refused, and what is said -------------------------------------------------------------------------------

GOOD = "--data_path {root}/data --model_max_length 61"
SEARCH = "--task needle --lengths 61"
REFUSED = {
    "unknown task": ("--task taste", ("--task 'taste' is unknown", "loss, needle")),
    "a flag of the other task": (f"{GOOD} --depths 0", ("--depths belongs to --task needle", "leave it out")),
    "no such bins": (f"{GOOD} --bins 62", ("--bins 62", "from 1 to 61")),
    "no data": ("", ("--data_path is missing",)),
    "four bits": (f"{GOOD} --lora_rank 4 --load_in_4bit True", ("--load_in_4bit True", "leave it out")),
    "no target": ("--data_path {root}/targetless.pkl", ("targetless.pkl has no target", "-100")),
    "data past the vocabulary": ("--data_path {root}/outside.pkl", ("token id 64", "vocabulary of 64")),
    "a needle past the vocabulary": (f"{SEARCH} --lengths 300 --tokenizer byte", ("the needle has token id", "of 64")),
    "a needle that does not fit": (f"{SEARCH} --lengths 61,3", ("--lengths 3", "take 4 tokens")),
    "a depth outside": (f"{SEARCH} --depths 0,1.5", ("--depths 0,1.5", "from 0 to 1")),
    "no depth": (f"{SEARCH} --depths low", ("--depths low", "from 0 to 1")),
    "no length": (f"{SEARCH} --lengths 61,0", ("--lengths 0 is not a number of tokens",)),
    "lengths that reach too far": (f"{SEARCH} --model_max_length 60", ("--lengths 61", "--model_max_length 60")),
    "no trial": (f"{SEARCH} --trials 0", ("--trials 0", "at least 1")),
    "one choice": (f"{SEARCH} --choices 1", ("--choices 1", "2 choices")),
    "more choices than ids": (f"{SEARCH} --choices 32", ("--choices 32", "give fewer")),
    "a hay of keys alone": (f"{SEARCH} --choices 31 --data_path {{root}}/upper.pkl", ("has only keys and values",)),
    "an evaluation that is there": (f"{GOOD} --output_dir {{root}}/there", ("evaluation.jsonl exists", "overwrite")),
    "output that is a file": (f"{GOOD} --output_dir {{root}}/text.jsonl", ("text.jsonl cannot be created", "another")),
    "a limit of a haystack": (f"{GOOD} --task needle --max_eval_samples 3", ("3 belongs to --task loss",)),
    "a flag that is gone": (f"{GOOD} --task needle --score greedy", ("--score was removed", "leave it out")),
    "a flag that is none": (f"{GOOD} --bin 3", ("unknown flag --bin",)),
}


def test_needles_have_no_ids_of_images() -> None:
    search = make_search(IdNeedles(64, (3, 60)), None, 30, 4, 0, (100,), 64)
    ids = np.concatenate([search.hay, *(needle.absent for needle in search.needles)])
    assert not np.isin(ids, [3, 60]).any() and len(np.unique(ids)) > 40


def test_impossible_evaluations_are_refused_in_one_line(files: Files) -> None:
    root = files.root
    data: dict[str, dict[str, list[list[int]]]] = {
        "targetless": {"input_ids": [[1, 2, 3]], "labels": [[-100, -100, -100]]},
        "outside": {"input_ids": [[1, VOCABULARY]]},
        "upper": {"input_ids": [list(range(VOCABULARY // 2, VOCABULARY))]},
    }
    for name, content in data.items():
        (root / f"{name}.pkl").write_bytes(pickle.dumps(content))
    (root / "there").mkdir()
    (root / "there" / evaluate.RECORD).write_text("kept\n")
    again = f"{GOOD} --output_dir {{root}}/there --overwrite_output_dir --model_name_or_path {{root}}/finder"
    again += " --model_max_length 600 --learning_rate 1 --bf16"
    given = [flags for flags, _ in REFUSED.values()]
    ends = spawn(2, evaluations, [files.words("new", flags).format(root=root) for flags in (*given, again)])
    for i, (case, (_, parts)) in enumerate(REFUSED.items()):
        said = "".join(rank_ends[i].err for rank_ends in ends)
        assert [rank_ends[i].status for rank_ends in ends] == [2, 2], (case, ends[0][i])
        assert said.startswith("error: ") and said.count("\n") == 1, (case, said)
        assert all(part in said for part in parts), (case, said)
    assert not (root / "new").exists()

    assert [rank_ends[-1].status for rank_ends in ends] == [0, 0], ends[0][-1]
    out = ends[0][-1].out
    assert "warning: sequences of 600 tokens exceed the 512 positions" in out and "bfloat16 compute" in out
    assert "flags that only affect training are ignored: --learning_rate" in out and not ends[1][-1].out
    assert files.records("there")[0]["valid_tokens"] == sum(size - 1 for size in SIZES)


def _narrated(rank: int, runs: list[str]) -> list[Ended]:
    progress.LINE_SECONDS = -1.0  # type: ignore[misc]
    return evaluations(rank, runs)


@pytest.mark.slow
def test_only_rank_0_shows_progress(files: Files) -> None:
    words = [files.words("told", GOOD), files.words("told-needle", f"{SEARCH} --trials 1 --depths 0.5", "finder")]
    first, second = spawn(2, _narrated, [line.format(root=files.root) for line in words])
    loss, needle = (end.err.splitlines() for end in first)
    assert loss and all(re.fullmatch(r"evaluating [\d,]+/[\d,]+, \d+ s", line) for line in loss)
    assert needle and all(re.fullmatch(r"needle, [\d,]+ tokens [\d,]+/[\d,]+, \d+ s", line) for line in needle)
    assert [end.err for end in second] == ["", ""]


OUT_OF_MEMORY = """
import sys, torch
from lightseq.tools.evaluate import command
from lightseq.training import trainer
from lightseq.cli import BOTH
trainer.Trainer.evaluation_shards = lambda *_, **__: torch.empty(1 << 55, dtype=torch.uint8)
command.main(BOTH, sys.argv[1:])
"""


def test_out_of_memory_ends_an_evaluation_with_a_remedy(files: Files, tmp_path: Path) -> None:
    (tmp_path / "fail.py").write_text(OUT_OF_MEMORY)
    done = forked.run(f"{tmp_path}/fail.py {files.words('full', GOOD).format(root=files.root)}", tmp_path)
    assert done.returncode == 1 and done.stderr.splitlines() == [
        "error: rank 0: host out of memory. Tried to allocate 33554432.00 GiB",
        "to fit: more ranks on a sequence (--sequence_parallel_size), a lower --model_max_length, or --bf16",
    ], done.stderr


def test_flags_that_only_affect_training_are_named_and_not_applied() -> None:
    flags = "--model_name_or_path m --data_path d --output_dir o"

    def given(words: str) -> tuple[TrainConfig, list[str]]:
        _, asked = evaluate.flags([*flags.split(), *words.split()])
        config = evaluate._without_training(asked)
        return config, [word for note in evaluate._notes(asked, config) for word in note.split(": ")[1].split(", ")]

    ignored = "--async_save False --lora_rank 2 --lora_target_modules q_proj --optim adamw_8bit --adam_beta2 0.95"
    config, named = given(f"{ignored} --tile_layers True --bf16")
    assert (config.optim, config.lora_rank, config.tile_layers, config.bf16) == (TrainConfig.optim, None, True, True)
    assert named == ["--optim", "--adam_beta2", "--lora_rank", "--lora_target_modules", "--async_save"]
    for offload, used, unused in (
        ("none", "none", []),
        ("activations", "none", ["--offload activations"]),
        ("both", "optimizer", ["--offload activations"]),
        ("optimizer", "optimizer", []),
        ("auto", "none", []),
    ):
        config, named = given(f"--offload {offload}")
        assert (config.offload, named) == (used, unused)
    assert given("--max_train_samples 9")[1] == [], "limits the rows of --data_path"
    assert given("--max_train_samples 9 --max_eval_samples 3")[1] == ["--max_train_samples"]
    config, named = given('--lr_scheduler_type polynomial --lr_scheduler_kwargs {"power":2}')
    assert LearningRate(config, total_steps=0), "of a run without a step"
    assert named == ["--lr_scheduler_type", "--lr_scheduler_kwargs"]
    config, named = given("--deepspeed zero.json")
    assert (config.deepspeed, named) == (None, ["--deepspeed"])


def test_a_search_records_its_texts_lengths_and_chance(files: Files, tmp_path: Path) -> None:
    flags = "--task needle --lengths 61,40 --depths 0.5 --trials 3"
    done = forked.run(f"-m lightseq evaluate {files.words('chance', flags)}", tmp_path)
    assert done.returncode == 0, done.stderr
    (found,) = [line for line in done.stdout.splitlines() if line.startswith("found ")]
    assert "% of 6 texts of 40 to 61 tokens, 3 per length and depth; chance finds 12.5% (8 answers), greedy" in found
    summary, _ = files.records("chance")
    assert (summary["chance"], summary["texts"], summary["trials"]) == (0.125, 6, 3)
    assert summary["data"] is None and summary["config"]["data_path"] is None
    assert summary["command"].startswith("lightseq evaluate --model_name_or_path")
