"""Rows made tokens: chats and answers, real tokenizers, the cache, every source, and what is said of bad data."""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
from programs import programs
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from worlds import spawn

from data_gen.__main__ import main as data_gen
from lightseq.config.command_line import parse
from lightseq.data import token_cache
from lightseq.data.batches import open_examples
from lightseq.data.examples import WindowExamples
from lightseq.data.sources import ReadOptions, source_identity
from lightseq.data.token_directory import write_token_directory
from lightseq.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from lightseq.training.inputs import find_examples
from lightseq.training.metrics import read_records
from lightseq.utils.tensors import IGNORE_INDEX

# As Mistral's and Llama 3's models have them.
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + "
    "m['content'] + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{% endif %}"
)
CHAT = [
    {"role": "user", "content": "Best move?"},
    {"role": "assistant", "content": "Nf3, surely."},
    {"role": "user", "content": "And then?"},
    {"role": "assistant", "content": "Castle."},
]


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    package, folder = pytest.importorskip("mistral_common"), tmp_path_factory.mktemp("mistral")
    pytest.importorskip("sentencepiece")
    found = Path(package.__path__[0]) / "data" / "mistral_instruct_tokenizer_240323.model.v3"
    shutil.copy(found, folder / "tokenizer.model")
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "chat_template": MISTRAL}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return load_tokenizer(str(folder))


@pytest.fixture(scope="module")
def llama3(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    package, folder = pytest.importorskip("llama_models"), tmp_path_factory.mktemp("llama3")
    pytest.importorskip("tiktoken")
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter

    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|r0|>", "<|r1|>", "<|r2|>", "<|r3|>", "<|start_header_id|>"]
    special += ["<|end_header_id|>", "<|r4|>", "<|eot_id|>"]
    file = str(Path(package.__path__[0]) / "llama3" / "tokenizer.model")
    made = TikTokenConverter(vocab_file=file, pattern=words, extra_special_tokens=special).converted()
    ends = {"bos_token": special[0], "eos_token": special[1], "chat_template": LLAMA3}
    PreTrainedTokenizerFast(tokenizer_object=made, **ends).save_pretrained(folder)
    return load_tokenizer(str(folder))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tokenizer of single characters whose settings hold a chat template."""
    folder = tmp_path_factory.mktemp("small")
    characters = ["<unk>", "</s>", *map(chr, range(32, 127))]
    made = tokenizers.Tokenizer(WordLevel({text: i for i, text in enumerate(characters)}, unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = Split("", "isolated"), Fuse()
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", unk_token="<unk>").save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{% for m in messages %}{{ '!' ~ m['content'] ~ eos_token }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(folder)


def make_model() -> LlamaForCausalLM:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=128, **sizes))


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def opened(
    source: str | Path, tokenizer: Tokenizer | None = None, length: int = 1000, vocab_size: int = 200_000, **how: Any
) -> WindowExamples:
    how.setdefault("cache", Path(source).parent / "cache")
    found = open_examples(source, length, vocab_size, tokenizer or ByteTokenizer(), False, True, ReadOptions(**how))
    assert isinstance(found, WindowExamples)
    return found


def learnt(examples: WindowExamples, tokenizer: Tokenizer, index: int = 0) -> list[str]:
    """The runs of targets of an example, as text, special tokens included."""
    runs, last = list[list[int]](), False
    for label in examples[index].labels.tolist():
        if label != IGNORE_INDEX:
            runs = [*runs, [label]] if not last else [*runs[:-1], [*runs[-1], label]]
        last = label != IGNORE_INDEX
    backend = getattr(tokenizer, "backend", None)
    return [tokenizer.decode(run) if backend is None else backend.decode(run) for run in runs]


def refusal(source: str | Path, tokenizer: Tokenizer | None = None, **how: Any) -> str:
    with pytest.raises(ValueError) as caught:
        opened(source, tokenizer, **how)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- what is learnt -------------------------------------------------------------------------------------------------


def test_only_the_answers_of_a_chat_are_learnt(tmp_path: Path, mistral: Tokenizer) -> None:
    sharegpt = [{"from": {"user": "human", "assistant": "gpt"}[t["role"]], "value": t["content"]} for t in CHAT]
    for name, row in (("a", {"messages": CHAT}), ("b", {"conversations": sharegpt})):
        examples = opened(lines(tmp_path / f"{name}.jsonl", row), mistral)
        assert [run.strip() for run in learnt(examples, mistral)] == ["Nf3, surely.</s>", "Castle.</s>"]
        assert mistral.backend.decode(examples[0].input_ids).count("[INST]") == 2
        whole = mistral.backend.apply_chat_template(CHAT, tokenize=True)["input_ids"]
        assert examples[0].input_ids.tolist() == whole and whole.count(1) == 1, "with one beginning"


def test_calls_of_tools_are_learnt(tmp_path: Path, mistral: Tokenizer) -> None:
    with_calls = MISTRAL.replace(
        "m['content'] + eos_token", "(m.tool_calls | string if m.tool_calls else m.content) + eos_token"
    )
    tokenizer = load_tokenizer(mistral.name, with_calls)
    for nothing in ({"content": ""}, {"content": None}, {}):
        chat = [CHAT[0], {"role": "assistant", "tool_calls": [{"name": "engine"}], **nothing}, CHAT[2], CHAT[3]]
        examples = opened(lines(tmp_path / f"{len(nothing)}.jsonl", {"messages": chat}), tokenizer)
        assert [run.strip() for run in learnt(examples, tokenizer)] == ["[{'name': 'engine'}]</s>", "Castle.</s>"]


@pytest.mark.parametrize(
    "row", [{"prompt": ["a"], "completion": ["b"]}, {"conversations": [{"from": ["a"], "value": "b"}]}]
)
def test_rows_that_are_no_chats_are_refused(tmp_path: Path, mistral: Tokenizer, row: dict[str, Any]) -> None:
    assert "row" in refusal(lines(tmp_path / "a.jsonl", row), mistral)


def test_a_mark_of_byte_order_before_a_json_array_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('\ufeff[{"text": "x"}, {"text": "y"}]', encoding="utf-8")
    assert len(opened(tmp_path / "a.json")) == 2


@pytest.mark.slow
def test_llama3s_own_tokenizer_reads_a_chat_as_its_template_writes_it(tmp_path: Path, llama3: Tokenizer) -> None:
    examples = opened(lines(tmp_path / "a.jsonl", {"messages": CHAT}), llama3)
    assert learnt(examples, llama3) == ["Nf3, surely.<|eot_id|>", "Castle.<|eot_id|>"]
    whole = llama3.backend.apply_chat_template(CHAT, tokenize=True)["input_ids"]
    assert examples[0].input_ids.tolist() == whole, "in parts as in one piece"
    assert llama3.vocab_size > 128_000 and examples[0].input_ids[0] == 128_000


def test_only_the_answer_to_a_prompt_is_learnt(tmp_path: Path, mistral: Tokenizer) -> None:
    for number, row in enumerate(({"prompt": "2+2=", "completion": "4"}, {"instruction": "2+2=", "output": "4"})):
        path = lines(tmp_path / f"{number}.jsonl", row)
        assert learnt(opened(path), ByteTokenizer()) == ["4"]
        assert opened(path)[0].labels[-2:].tolist() == [256, IGNORE_INDEX], "the end is learnt too"
        assert [run.strip() for run in learnt(opened(path, mistral), mistral)] == ["4</s>"]
    turns = {"prompt": CHAT[:3], "completion": CHAT[3:]}
    answers = learnt(opened(lines(tmp_path / "c.jsonl", turns), mistral), mistral)
    assert [answer.strip() for answer in answers] == ["Castle.</s>"], "answers within the prompt are no targets"


def test_ids_are_taken_as_they_are(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]})
    assert opened(path)[0].labels.tolist() == [IGNORE_INDEX, 7, 8, IGNORE_INDEX]
    assert "'labels' differ from input_ids" in refusal(lines(tmp_path / "b.jsonl", {"input_ids": [5], "labels": [6]}))


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_rows_of_ids_ask_for_no_tokenizer(tmp_path: Path, suffix: str) -> None:
    path, read_options = (
        lines(tmp_path / f"a{suffix}", {"input_ids": [5, 299, 7]}),
        ReadOptions(cache=tmp_path / "cache"),
    )
    for lazy in (True, False):
        examples = open_examples(path, 8, 300, None, lazy, read_options=read_options)
        assert isinstance(examples, WindowExamples) and examples[0].input_ids.tolist() == [5, 299, 7]
        assert examples.source.meta["tokenizer"] is None and "without a tokenizer" in examples.notes[0]
    if suffix == ".jsonl":
        assert len(open_examples(path, 8, 300, str(tmp_path), read_options=read_options)) == 1, (
            "a model's directory without one"
        )


def test_rows_that_teach_nothing_are_named_before_a_tokenizer_is_asked_for(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "a.parquet")
    for name, content in (("a.jsonl", ""), ("b.json", "{}"), ("c.jsonl", '{"body": 1}'), ("d.jsonl", '{"text": "a"}')):
        (tmp_path / name).write_text(content)
    for name, said in (
        ("a.jsonl", "a.jsonl holds no row"),
        ("a.parquet", "a.parquet holds no row"),
        ("b.json", "b.json line 1 has no columns; give it 'text', messages"),
        ("c.jsonl", "it has: body; name the text with --text_column"),
        ("d.jsonl", "d.jsonl holds text, which needs a tokenizer; give --tokenizer"),
    ):
        with pytest.raises(ValueError, match=said):
            open_examples(tmp_path / name, 8, 300)


def test_padding_is_cut_off_as_the_attention_mask_says_and_counted(tmp_path: Path) -> None:
    padded = {"input_ids": [5, 6, 7, 0, 0], "attention_mask": [1, 1, 1, 0, 0]}
    whole, hidden = {"input_ids": [8, 9], "attention_mask": None}, {"input_ids": [0, 0], "attention_mask": [0, 0]}
    examples = opened(lines(tmp_path / "a.jsonl", padded, whole, padded, hidden))
    assert [examples[i].input_ids.tolist() for i in range(3)] == [[5, 6, 7], [8, 9], [5, 6, 7]]
    assert any("cut 4 tokens of padding off 2 rows, by attention_mask" in n for n in examples.notes)
    assert examples.source.meta["skipped"]["empty"] == 1
    labelled = {**padded, "labels": [-100, 6, 7, -100, -100]}
    assert opened(lines(tmp_path / "b.jsonl", labelled))[0].labels.tolist() == [6, 7, IGNORE_INDEX]
    for mask in ([0, 0, 1, 1, 1], [1, 1, 0, 1, 0], [1, 1, 1]):
        said = refusal(lines(tmp_path / "c.jsonl", padded, {**padded, "attention_mask": mask}))
        assert said.startswith(f"{tmp_path}/c.jsonl line 2: 'attention_mask' ") and "pad on the right" in said


def test_a_long_row_is_split_and_loses_no_target(tmp_path: Path) -> None:
    rows = [{"prompt": "p" * n, "completion": "a" * m} for n, m in ((3, 10), (30, 1), (1, 1))]
    path = lines(tmp_path / "a.jsonl", *rows)
    for length in (1, 2, 7, 8, 100):
        examples = opened(path, length=length)
        targets = sum(int((examples[i].labels != IGNORE_INDEX).sum()) for i in range(len(examples)))
        assert targets == sum(m + 1 for _, m in ((3, 10), (30, 1), (1, 1))), length
        barren = sum(not (examples[i].labels != IGNORE_INDEX).any() for i in range(len(examples)))
        assert any(f"{barren} window" in note and "without a target" in note for note in examples.notes) is (barren > 0)
        assert any("(document 1: " in note for note in examples.notes) is (barren > 0), "most of them are here"


def test_flags_of_rows_are_honoured_or_refused(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"text": "one"}, {"text": "two"})
    read_options = ReadOptions(limit=1, cache=tmp_path / "cache")
    assert len(open_examples(path, 9, 300, "byte", lazy=True, read_options=read_options)) == 1
    tokens = opened(path).source.path
    for given, line in (
        (read_options, "--max_train_samples 1"),
        (ReadOptions(text_column="body"), "--text_column body"),
    ):
        with pytest.raises(ValueError, match=f"{line} applies to rows"):
            open_examples(tokens, 9, 300, read_options=given)


# ---- the tokenizer --------------------------------------------------------------------------------------------------


def test_tokens_of_another_tokenizer_are_refused_with_both_names(
    tmp_path: Path, small: str, mistral: Tokenizer
) -> None:
    rows = lines(tmp_path / "a.jsonl", {"text": "one two"})

    def reopened(tokens: Path, tokenizer: str | Tokenizer | None) -> WindowExamples:
        found = open_examples(tokens, 9, 200_000, tokenizer)
        assert isinstance(found, WindowExamples)
        return found

    copy = shutil.copytree(small, tmp_path / "copy")
    for made, same, other in (
        ("byte", "byte", small),
        (small, str(copy), "byte"),
        (small, load_tokenizer(str(copy)), mistral),
        (mistral.name, mistral, small),
    ):
        tokens = tmp_path / f"tokens-{len(list(tmp_path.iterdir()))}"
        assert data_gen(["text", str(rows), "--tokenizer", made, "--output", str(tokens)]) == 0
        for tokenizer in (same, None, str(tmp_path)):  # a model's directory may have no tokenizer
            assert len(reopened(tokens, tokenizer)) == 1
        with pytest.raises(ValueError, match=f"was made with tokenizer {made}, but the model has tokenizer "):
            reopened(tokens, other)
        meta = json.loads((tokens / "meta.json").read_text())
        del meta["tokenizer_fingerprint"]
        (tokens / "meta.json").write_text(json.dumps(meta))
        if "byte" in (made, other):
            with pytest.raises(ValueError, match=f"was made with tokenizer {made}, but"):
                reopened(tokens, other)
        else:
            assert "made by an older version with tokenizer" in reopened(tokens, other).notes[-1]


# ---- the cache ------------------------------------------------------------------------------------------------------


def test_rows_are_tokenised_once_and_again_when_anything_changes(
    tmp_path: Path, mistral: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = lines(tmp_path / "a.jsonl", {"text": "one", "title": "1"}, {"text": "two", "title": "22"})
    written: list[Path] = []
    write = token_cache._write
    monkeypatch.setattr(
        token_cache, "_write", lambda directory, *rest: (written.append(directory), write(directory, *rest))
    )
    first = opened(path)
    assert opened(path, length=2).source.path == first.source.path and len(written) == 1
    opened(path, mistral)
    opened(path, text_column="title")
    assert len(opened(path, limit=1)) == 1 and len(set(written)) == len(written) == 4
    lines(path, {"text": "three"})
    assert opened(path).source.meta["documents"] == 1 and len(written) == 5
    meta = json.loads((first.source.path / "meta.json").read_text())
    assert meta["source"] == str(path) and meta["kind"] == "text" and meta["skipped"] == {}


def test_one_of_several_readers_writes_the_tokens_that_all_want(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = lines(tmp_path / "a.jsonl", *({"text": f"text {i}"} for i in range(600)))
    written: list[Path] = []
    write = token_cache._write
    monkeypatch.setattr(
        token_cache, "_write", lambda directory, *rest: (written.append(directory), write(directory, *rest))
    )
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: opened(path)[599].input_ids.tolist(), range(4)))
    assert len(written) == 1 and found == [[*b"text 599", 256]] * 4


def test_a_failed_tokenization_leaves_nothing_in_the_cache(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", *({"text": "x"} for _ in range(300)), {"body": "x"})
    assert "line 301 has no column 'text'; it has: body" in refusal(path)
    assert [p.suffix for p in (tmp_path / "cache").iterdir()] == [".lock"]


def test_leftovers_of_a_killed_process_are_removed_and_stop_nobody(tmp_path: Path) -> None:
    path, cache = lines(tmp_path / "a.jsonl", {"text": "one"}), tmp_path / "cache"
    directory = opened(path).source.path
    shutil.rmtree(directory)
    for left in (f".{directory.name}.partial-{os.getpid()}", f".{directory.name}.partial-x1", ".other.partial-x1"):
        (cache / left).mkdir()
        (cache / left / "tokens.bin").write_bytes(b"1")
    assert opened(path).source.path == directory
    assert {p.name for p in cache.iterdir()} == {directory.name, f"{directory.name}.lock", ".other.partial-x1"}


# ---- sources --------------------------------------------------------------------------------------------------------


def test_a_folder_is_read_file_by_file(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    folder = tmp_path / "rows"
    (folder / "more").mkdir(parents=True)
    lines(folder / "a.jsonl", {"text": "a"})
    pq.write_table(pa.table({"text": ["b"]}), folder / "b.parquet")
    lines(folder / "more" / "c.jsonl", {"text": "c"})
    (folder / "config.json").write_text("{}")
    array = tmp_path / "array.json"
    array.write_text(json.dumps([{"text": "d"}, {"text": "e"}]))
    for source, texts in ((folder, b"abc"), (array, b"de"), (lines(tmp_path / "lines.json", {"text": "f"}), b"f")):
        examples = opened(source)
        assert bytes(int(examples[i].input_ids[0]) for i in range(len(examples))) == texts


def test_files_of_a_folder_that_are_not_read_are_said(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    lines(folder / "a.jsonl", {"text": "a"})
    for name in ("b.json", "c.json.gz", "d.txt", "e.zst", "f.JSONL", "g.csv", ".h.jsonl"):
        (folder / name).write_text("{}")
    examples = opened(folder)
    said = f"{folder}: skipped 6 files (b.json, c.json.gz, d.txt, e.zst, f.JSONL, …)"
    assert any(note.startswith(said) for note in examples.notes)
    (folder / "a.jsonl").unlink()
    assert ".ndjson, .parquet or .arrow files; it holds b.json, c.json.gz, d.txt" in refusal(folder)


def test_data_sets_are_read_from_disk_and_streamed_from_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"messages": CHAT, "prompt": "x"}, {"messages": CHAT[:2], "prompt": "y"}])
    rows.select_columns(["prompt"]).rename_column("prompt", "text").save_to_disk(str(tmp_path / "saved"))
    assert bytes(int(opened(tmp_path / "saved")[i].input_ids[0]) for i in range(2)) == b"xy"
    ids = datasets.Dataset.from_list([{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}])
    ids.with_format("torch", columns=["input_ids"]).save_to_disk(str(tmp_path / "tensors"))
    assert opened(tmp_path / "tensors")[0].labels.tolist() == [6, 7, IGNORE_INDEX], "columns that a format hides count"
    datasets.DatasetDict({"dev": rows}).save_to_disk(str(tmp_path / "several"))
    assert "no split train; give the path of one of: dev" in refusal(tmp_path / "several")
    asked: list[Any] = []

    def load(*names: str, split: str, streaming: bool) -> Any:
        asked.append((*names, split, streaming))
        return iter([{"text": "from afar"}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *names: type("Builder", (), {"hash": "7"}))
    examples = opened("hf:ada/games:test", cache=tmp_path / "cache")
    assert asked == [("ada/games", "test", True)] and bytes(examples[0].input_ids[:-1].astype(np.uint8)) == b"from afar"
    opened("hf:ada/games:chess:dev", cache=tmp_path / "cache")
    assert asked[1:] == [("ada/games", "chess", "dev", True)]
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda name: (_ for _ in ()).throw(OSError("no such set")))
    assert refusal("hf:ada/none", cache=tmp_path / "cache").startswith("hf:ada/none: no such set")


# ---- bad data -------------------------------------------------------------------------------------------------------


def test_skipped_rows_are_counted_named_and_recorded(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": ""}, {"prompt": "", "completion": None}]
    path = lines(tmp_path / "a.jsonl", *rows, *rows)
    examples = opened(path)
    note = next(note for note in examples.notes if "skipped rows" in note)
    assert "2 empty, 2 without an answer" in note and f"{path} line 2: without an answer; {path} line 3: empty" in note
    meta = json.loads((examples.source.path / "meta.json").read_text())
    assert meta["skipped"] == {"without an answer": 2, "empty": 2} and meta["skipped_rows"][0].startswith(str(path))
    assert [note for note in opened(path).notes if "skipped rows" in note] == [note], "the cache says it again"


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ('{"text": "a"}\n{oops\n', "line 2 is not JSON"),
        ('{"text": "a"}\n{"text":\n', "line 2 is not JSON: Expecting value in column 9"),
        ('{"body": 1}', "line 1 has no column 'text', messages, or prompt and completion; it has: body"),
        ('{"text": "a"}\n{"body": "b"}', "line 2 has no column 'text'; it has: body"),
        ('{"text": 3}', "line 1: 'text' is 3, not text"),
        ("[1]", "is a list, not an object"),
        ("", "holds no row"),
        ('{"text": ""}\n{"text": null}', "no row with a target"),
        ('{"text": "naïve"}\n', "line 1 has token id 256, outside the model's vocabulary of 256"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "is a chat, but tokenizer byte has no chat template"),
        ('{"input_ids": [1, "2"]}', "not a list of integers"),
        ('{"input_ids": [[1, 2], [3]]}', "line 1: 'input_ids' is [[1, 2], [3]], not a list of integers"),
        ('{"input_ids": [[1, 2], [3, 4]]}', "line 1: 'input_ids' is [[1, 2], [3, 4]], not a list of integers"),
        ('{"input_ids": [1, 99999999999999999999]}', "not a list of integers"),
        ('{"input_ids": 7}', "line 1: 'input_ids' is 7, not a list of integers"),
        ('{"input_ids": [1, 2], "labels": [[1], [2, 3]]}', "line 1: 'labels' is [[1], [2, 3]], not a list of integers"),
        (
            '{"input_ids": [1, 2, 3]}\n{"input_ids": [1, 2, 3], "labels": [-100, -100, 3]}',
            "line 2 has labels, but the first row has none; give every row labels",
        ),
    ],
)
def test_bad_rows_are_one_line_with_file_and_row(tmp_path: Path, content: str, line: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    said = refusal(path, vocab_size=256)
    assert said.startswith(str(path)) and line in said


def test_a_corrupt_shard_is_named(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    folder = tmp_path / "rows"
    folder.mkdir()
    pq.write_table(pa.table({"text": ["a"]}), folder / "a.parquet")
    (folder / "b.parquet").write_bytes((folder / "a.parquet").read_bytes()[:-9])
    assert f"{folder}/b.parquet cannot be read as Parquet past row 0" in refusal(folder)


def test_bad_chats_are_one_line(tmp_path: Path, mistral: Tokenizer) -> None:
    forgets = dict(MISTRAL=MISTRAL.replace("'[INST] '", "'[INST] ' + (messages|length|string)"))["MISTRAL"]
    cases = [
        ({"messages": "hello"}, "'messages' is 'hello', not a list of turns"),
        ({"messages": [{"role": "user"}]}, "has no role or content"),
        (
            {"messages": [*CHAT[:1], {"role": "assistant", "content": "\ud800"}]},
            "line 1, rendered by the chat template of ",
        ),
    ]
    for number, (row, line) in enumerate(cases):
        assert line in refusal(lines(tmp_path / f"{number}.jsonl", row), mistral)
    template = mistral.backend.chat_template
    try:
        mistral.backend.chat_template = forgets
        path = lines(tmp_path / "forgets.jsonl", {"messages": CHAT})
        said = refusal(path, mistral)
        assert "line 1: the chat template" in said and "so the answer cannot be located" in said
    finally:
        mistral.backend.chat_template = template


TEMPLATE = "{% for m in messages %}{{ m['role'] ~ ': ' ~ m['content'] ~ eos_token }}{% endfor %}" + (
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def with_template(source: Path, tokenizer: str, template: str) -> WindowExamples:
    read_options = ReadOptions(cache=source.parent / "cache", chat_template=template)
    found = open_examples(source, 1000, 200_000, tokenizer, False, True, read_options)
    assert isinstance(found, WindowExamples)
    return found


def test_a_chat_template_replaces_the_tokenizers_and_has_tokens_of_its_own(tmp_path: Path, small: str) -> None:
    chats = lines(tmp_path / "chats.jsonl", {"messages": CHAT})
    pairs = lines(tmp_path / "pairs.jsonl", {"prompt": "Best move?", "completion": "Castle."})
    (tmp_path / "mine.jinja").write_text(TEMPLATE)
    decode = load_tokenizer(small)
    for source, answers in ((chats, ["Nf3, surely.</s>", "Castle.</s>"]), (pairs, ["Castle.</s>"])):
        own, text = opened(source, decode), with_template(source, small, TEMPLATE)
        assert learnt(own, decode) == ["!" + answer for answer in answers]
        assert learnt(text, decode) == answers
        assert decode.backend.decode(text[0].input_ids[:18].tolist()).startswith("user: Best move?</s>")
        assert text.source.path != own.source.path
        assert with_template(source, small, str(tmp_path / "mine.jinja")).source.path == text.source.path
        other = with_template(source, small, TEMPLATE.replace("user", "human").replace(": ", "> "))
        assert other.source.path not in (own.source.path, text.source.path)


@pytest.mark.parametrize(
    ("template", "line"),
    [
        (
            "gone.jinja",
            "--chat_template 'gone.jinja' cannot be read (No such file or directory); give a file,",
        ),
        ("/", "--chat_template '/' cannot be read (Is a directory); give a file"),
        ("x" * 5000, "cannot be read (File name too long)"),
        ("{% for m in messages %}", "--chat_template is not a Jinja template (line 1: Unexpected end of template"),
        ("{{ messages | nosuch }}", "line 1: --chat_template fails: No filter named 'nosuch'"),
        ("{{ raise_exception('no such role') }}", "line 1: --chat_template fails: no such role"),
        ("{{ messages[0].content.nosuch.again }}", "line 1: --chat_template fails: 'str object' has no attribute"),
        (
            "{{ messages | length }}",
            "line 1: --chat_template writes the turns before an answer in another way than with",
        ),
    ],
)
def test_a_chat_template_that_does_not_render_is_refused_in_one_line(
    tmp_path: Path, small: str, template: str, line: str
) -> None:
    chats = lines(tmp_path / "chats.jsonl", {"messages": CHAT})
    with pytest.raises(ValueError) as caught:
        with_template(chats, small, template)
    assert line in str(caught.value) and "\n" not in str(caught.value)


def test_bytes_have_no_chat_template(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^--chat_template needs a tokenizer with tokens that end a turn, not byte"):
        with_template(lines(tmp_path / "chats.jsonl", {"messages": CHAT}), "byte", TEMPLATE)


# ---- in a run ------------------------------------------------------------------------------------------------------


def test_checkpoints_save_the_chat_template_that_they_were_trained_with(tmp_path: Path, small: str) -> None:
    chats = lines(tmp_path / "chats.jsonl", {"messages": CHAT})
    text = lines(tmp_path / "text.jsonl", {"text": "Best move?"})
    (tmp_path / "mine.jinja").write_text(TEMPLATE)
    make_model().save_pretrained(tmp_path / "model")
    words = f"--model_name_or_path {tmp_path}/model --tokenizer {small} --model_max_length 32 --max_steps 1"
    words += f" --data_cache {tmp_path}/cache --chat_template {tmp_path}/mine.jinja"
    (tmp_path / "zero.json").write_text('{"zero_optimization": {"stage": 2}}')
    flags = {"whole": "", "adapters": "--lora_rank 2", "zero": f"--deepspeed {tmp_path}/zero.json"}
    runs = [f"{words} --data_path {chats} --output_dir {tmp_path}/{name} {more}" for name, more in flags.items()]
    *ends, refused = spawn(1, programs, "llama3", [*runs, f"{words} --data_path {text} --output_dir {tmp_path}/text"])[
        0
    ]
    assert [end.status for end in ends] == [0] * len(ends), ends
    for name in flags:
        saved = AutoTokenizer.from_pretrained(tmp_path / name / "checkpoint-1")
        assert saved.chat_template == TEMPLATE != AutoTokenizer.from_pretrained(small).chat_template
    line = "error: --chat_template applies to chats and to prompts with answers, which the data does not hold; "
    assert (refused.status, refused.err) == (2, f"{line}leave it out\n") and not (tmp_path / "text").exists()


@pytest.mark.slow
def test_a_run_reads_rows_once_and_goes_on_with_the_next_on_other_ranks(tmp_path: Path) -> None:
    rows = [{"prompt": "p" * (40 if i == 5 else 3), "completion": "answer"[: 1 + i % 6]} for i in range(8)]
    path = lines(tmp_path / "a.jsonl", *rows, {"prompt": "p", "completion": ""})
    common = (
        "--model_name_or_path tiny-llama3 --random_init --tokenizer byte --model_max_length 16 --learning_rate 1e-3 "
        f"--data_path {path} --data_cache {tmp_path}/cache --num_train_epochs 1 --lr_scheduler_type constant"
    )
    runs = [
        f"{common} --output_dir {tmp_path}/whole",
        f"{common} --output_dir {tmp_path}/parts --sequence_parallel_size 1 --max_steps 3",
        f"{common} --output_dir {tmp_path}/parts --resume_from_checkpoint True",
        f"{common} --output_dir {tmp_path}/parts --resume_from_checkpoint True --seed 1 --num_train_epochs 2",
    ]
    ends = spawn(2, programs, "llama3", runs)[0]
    assert [end.status for end in ends] == [0, 0, 0, 2], [end.err for end in ends]
    said = [" ".join(end.out.split()) for end in ends]
    whole, parts = (read_records(tmp_path / run / "metrics.jsonl") for run in ("whole", "parts"))
    targets = sum(2 + i % 6 for i in range(8))
    assert [sum(record["valid_tokens"] for record in records) for records in (whole, parts)] == [targets, targets]
    assert f"skipped rows: 1 without an answer ({path} line 9" in said[0]
    assert "2 windows of 10 without a target (document 5: 2)" in said[0]
    assert "1 from example 6 on, none skipped or repeated" in said[2]
    assert len(whole) == 10 and len(parts) == 3 + 4
    assert "was trained with --seed 42, not with --seed 1" in ends[3].err
    assert len([p for p in (tmp_path / "cache").iterdir() if p.is_dir()]) == 1


def test_steps_without_a_target_are_counted_and_no_part_of_the_loss(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"prompt": "p" * 100, "completion": "ab"}, {"prompt": "p", "completion": "no"})
    common = (
        "--model_name_or_path tiny-llama3 --random_init --tokenizer byte --model_max_length 16 --learning_rate 1e-3 "
        f"--data_path {path} --data_cache {tmp_path}/cache --num_train_epochs 1 --save_strategy no"
    )
    runs = [
        f"{common} --output_dir {tmp_path}/{name} {more}"
        for name, more in (
            ("each", ""), ("all", "--logging_steps 8"), ("ranks", "--logging_steps 4 --sequence_parallel_size 1")
        )
    ]  # fmt: skip
    ends = spawn(2, programs, "llama3", runs)[0]
    assert [end.status for end in ends] == [0, 0, 0], [end.err for end in ends]
    each, whole, ranks = (read_records(tmp_path / run / "metrics.jsonl") for run in ("each", "all", "ranks"))
    losses = [record["loss"] for record in each if record["loss"] is not None]
    assert len(each) == 8 and len(losses) == 2 and min(losses) > 4
    assert [record["steps_without_target"] == 0 for record in each] == [record["loss"] is not None for record in each]
    assert whole[-1]["steps_without_target"] == 6 and whole[-1]["loss"] == pytest.approx(sum(losses) / 2)
    assert ranks[-1]["loss"] > 4 and ranks[-1]["steps_without_target"] in (2, 3), "of two sequences each"
    for end, line in zip(
        ends, ("1 of 1 step up to step", "6 of 8 steps up to step 8", "of 4 steps up to"), strict=True
    ):
        assert f"{line} " in end.out and "had no target; only momentum and weight decay" in end.out
    assert f"from {losses[0]:.4f} to {losses[1]:.4f}" in ends[0].out and "no target  " in ends[0].out


@pytest.mark.parametrize("source", ["hf:", "hf::", "hf:a::b", "hf:a:b:c:d"])
def test_a_malformed_hub_name_is_refused_before_the_hub_is_asked(source: str) -> None:
    with pytest.raises(ValueError, match=f"{source} is not the name of a data set; give hf:NAME"):
        source_identity(source)


# ---- training and evaluation data -----------------------------------------------------------------------------------


def found(flags: str, path: Path, evaluates: bool) -> int:
    strategy = "steps" if "--eval_data_path" in flags else "no"
    words = f"--model_name_or_path m --output_dir o --model_max_length 9 --eval_strategy {strategy} {flags}"
    config = parse(words.split(), "")
    model: Any = SimpleNamespace(config=SimpleNamespace(vocab_size=300), tokenizer="byte")
    return len(find_examples(str(path), model, config, SimpleNamespace(is_main=True), evaluates))  # type: ignore[arg-type]


def test_the_limit_of_training_rows_leaves_evaluation_whole(tmp_path: Path) -> None:
    rows = lines(tmp_path / "a.jsonl", *({"text": f"row {i}"} for i in range(5)))
    flags = f"--data_path {rows} --data_cache {tmp_path}/cache --max_train_samples 2"
    assert found(flags, rows, False) == 2
    assert found(f"{flags} --eval_data_path {rows}", rows, True) == 5


def test_a_text_column_is_that_of_the_data_which_has_rows(tmp_path: Path) -> None:
    rows, tokens = lines(tmp_path / "a.jsonl", {"content": "a text"}), tmp_path / "tokens"
    write_token_directory(tokens, [np.arange(5)], 300, dict)
    sources = f"--data_path {rows} --eval_data_path {tokens}"
    flags = f"{sources} --data_cache {tmp_path}/cache --text_column content"
    assert found(flags, rows, False) == found(flags, tokens, True) == 1
    with pytest.raises(ValueError, match="--text_column content applies to rows"):
        found(f"--data_path {tokens} --text_column content", tokens, False)
