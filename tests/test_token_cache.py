"""Rows as tokens: real tokenizers, the cache, every source, and errors and notes about bad data."""

from __future__ import annotations

import dataclasses
import json
import os
import re
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
from lightseq.data.examples import WindowExamples
from lightseq.data.load_tokenizer import load_tokenizer
from lightseq.data.open_examples import open_examples
from lightseq.data.sources import ReadOptions, source_identity
from lightseq.data.token_directory import write_token_directory
from lightseq.data.tokenizer import ByteTokenizer, Tokenizer
from lightseq.models import hub
from lightseq.training.metrics import read_records
from lightseq.training.run_data import find_examples
from lightseq.utils.tensors import IGNORE_INDEX

datasets, pa, pq = map(pytest.importorskip, ("datasets", "pyarrow", "pyarrow.parquet"))

# As Mistral's models have it.
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
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


def test_only_answers_are_learnt(tmp_path: Path, mistral: Tokenizer) -> None:
    examples = opened(lines(tmp_path / "a.jsonl", {"messages": CHAT}), mistral)
    assert [run.strip() for run in learnt(examples, mistral)] == ["Nf3, surely.</s>", "Castle.</s>"]
    whole = mistral.backend.apply_chat_template(CHAT, tokenize=True)["input_ids"]
    assert examples[0].input_ids.tolist() == whole and whole.count(1) == 1, "with one beginning"
    for number, row in enumerate(({"prompt": "2+2=", "completion": "4"}, {"instruction": "2+2=", "output": "4"})):
        path = lines(tmp_path / f"{number}.jsonl", row)
        assert learnt(opened(path), ByteTokenizer()) == ["4"]
        assert opened(path)[0].labels[-2:].tolist() == [256, IGNORE_INDEX], "the end is learnt too"
        assert [run.strip() for run in learnt(opened(path, mistral), mistral)] == ["4</s>"]


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_rows_of_ids_ask_for_no_tokenizer(tmp_path: Path, suffix: str) -> None:
    path, options = lines(tmp_path / f"a{suffix}", {"input_ids": [5, 299, 7]}), ReadOptions(cache=tmp_path / "cache")
    for lazy in (True, False):
        examples = open_examples(path, 8, 300, None, lazy, read_options=options)
        assert isinstance(examples, WindowExamples) and examples[0].input_ids.tolist() == [5, 299, 7]
        assert examples.source.meta["tokenizer"] is None and "without a tokenizer" in examples.notes[0]
    if suffix == ".jsonl":  # a model's directory may have no tokenizer
        assert len(open_examples(path, 8, 300, str(tmp_path), read_options=options)) == 1


def test_text_without_a_tokenizer_is_refused_and_rows_that_teach_nothing_before_that(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "a.parquet")
    for path, said in (
        (tmp_path / "a.parquet", "a.parquet holds no row"),
        (lines(tmp_path / "b.jsonl"), "b.jsonl holds no row"),
        (lines(tmp_path / "c.jsonl", {"body": 1}), "it has: body"),
        (lines(tmp_path / "d.jsonl", {"text": "a"}), "d.jsonl holds text, which needs a tokenizer; give --tokenizer"),
    ):
        with pytest.raises(ValueError, match=said):
            open_examples(path, 8, 300)


def test_padding_is_cut_off_as_the_attention_mask_says_and_counted(tmp_path: Path) -> None:
    padded = {"input_ids": [5, 6, 7, 0, 0], "attention_mask": [1, 1, 1, 0, 0]}
    whole, hidden = {"input_ids": [8, 9], "attention_mask": None}, {"input_ids": [0, 0], "attention_mask": [0, 0]}
    examples = opened(lines(tmp_path / "a.jsonl", padded, whole, padded, hidden))
    assert [examples[i].input_ids.tolist() for i in range(3)] == [[5, 6, 7], [8, 9], [5, 6, 7]]
    assert any("cut 4 tokens of padding off 2 rows, by attention_mask" in n for n in examples.notes)
    assert examples.source.meta["skipped"]["empty"] == 1
    labelled = {**padded, "labels": [-100, 6, 7, -100, -100]}
    assert opened(lines(tmp_path / "b.jsonl", labelled))[0].labels.tolist() == [6, 7, IGNORE_INDEX]


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_text_is_cut_on_access_or_split_into_windows_beforehand(tmp_path: Path, lazy: bool, kind: str) -> None:
    path, texts = tmp_path / f"text.{kind}", ["abcd", None, "", "e"]
    if kind == "parquet":
        pq.write_table(pa.table({"text": texts}), path)
    else:
        lines(path, *({"text": text} for text in texts))
    examples = open_examples(path, 3, 300, "byte", lazy, read_options=ReadOptions(cache=tmp_path / "cache"))
    found = [
        (bytes(x.input_ids[x.input_ids < 256].tolist()), x.labels.tolist())
        for x in map(examples.__getitem__, range(len(examples)))
    ]
    assert found[0] == (b"abc", [*b"bcd"]) and found[-1] == (b"e", [256, IGNORE_INDEX])
    notes = "\n".join(examples.notes)
    assert "skipped rows: 2 empty (" in notes and f"{path} {'row 1' if kind == 'parquet' else 'line 2'}: empty" in notes
    if lazy:
        assert len(found) == 2 and "tokenized on access" in notes
    else:
        assert found[1] == (b"d", [256, IGNORE_INDEX]) and "1 row of more than 3 tokens cut into pieces" in notes


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


def test_a_hugging_face_tokenizer_ends_every_document(small: str, tmp_path: Path) -> None:
    tokenizer, byte = load_tokenizer(small), ByteTokenizer()
    ids = tokenizer.encode("a b")
    assert tokenizer.vocab_size == 97 and ids[-1] == 1 and tokenizer.decode(ids) == "a b"
    assert byte.encode("naïve ∑")[-1] == 256 and byte.decode(byte.encode("naïve ∑")) == "naïve ∑"
    with pytest.raises(ValueError, match="nowhere"):
        load_tokenizer(str(tmp_path / "nowhere"))


def test_a_hub_that_does_not_answer_for_a_tokenizer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def unanswered(url: str, timeout: float) -> None:
        raise RuntimeError("Name or service not known.\nRetrying.")

    monkeypatch.setattr(hub, "get_hf_file_metadata", unanswered)
    with pytest.raises(ValueError, match=r"^tokenizer a/b .*\(RuntimeError: Name or service not known\); .*byte$"):
        load_tokenizer("a/b")


# ---- the cache ------------------------------------------------------------------------------------------------------


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Directories that the cache writes."""
    found: list[Path] = []
    write = token_cache._write
    monkeypatch.setattr(token_cache, "_write", lambda path, *rest: (found.append(path), write(path, *rest)))
    return found


def test_rows_are_tokenized_once_and_again_when_anything_changes(
    tmp_path: Path, mistral: Tokenizer, written: list[Path]
) -> None:
    path = lines(tmp_path / "a.jsonl", {"text": "one", "title": "1"}, {"text": "two", "title": "22"})
    first = opened(path)
    assert opened(path, length=2).source.path == first.source.path and len(written) == 1
    opened(path, mistral)
    opened(path, text_column="title")
    assert len(opened(path, limit=1)) == 1 and len(set(written)) == len(written) == 4
    lines(path, {"text": "three"})
    assert opened(path).source.meta["documents"] == 1 and len(written) == 5
    meta = json.loads((first.source.path / "meta.json").read_text())
    assert meta["source"] == str(path) and meta["kind"] == "text" and meta["skipped"] == {}


def test_one_of_several_readers_writes_the_tokens_that_all_want(tmp_path: Path, written: list[Path]) -> None:
    path = lines(tmp_path / "a.jsonl", *({"text": f"text {i}"} for i in range(600)))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: opened(path)[599].input_ids.tolist(), range(4)))
    assert len(written) == 1 and found == [[*b"text 599", 256]] * 4


def test_a_failed_tokenization_leaves_nothing_in_the_cache(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", *({"text": "x"} for _ in range(300)), {"body": "x"})
    assert "line 301 has no column 'text'; it has: body" in refusal(path)
    assert [p.suffix for p in (tmp_path / "cache").iterdir()] == [".lock"]


def test_leftovers_of_a_killed_process_are_removed_and_block_no_run(tmp_path: Path) -> None:
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
    for name in ("b.json", "c.json.gz", "d.md", "e.zst", "f.JSONL", "g.csv", ".h.jsonl"):
        (folder / name).write_text("{}")
    examples = opened(folder)
    said = f"{folder}: skipped 6 files (b.json, c.json.gz, d.md, e.zst, f.JSONL, …)"
    assert any(note.startswith(said) for note in examples.notes)
    (folder / "a.jsonl").unlink()
    (folder / "d.md").unlink()
    assert ".parquet, .arrow, .txt or .md files; it holds b.json, c.json.gz, e.zst" in refusal(folder)


def test_data_sets_are_read_from_disk_and_streamed_from_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        ('{"text": "a"}\n{"text": "bc\\ud800"}', "line 2: character 2 is \\ud800, an unpaired surrogate"),
        ('{"text": "a"}\n{"text":\n', "line 2 is not JSON: Expecting value in column 9"),
        (
            '{"body": 1}',
            "line 1 has no column 'text', messages, or prompt and completion; it has: body; rename a question and its ",
        ),
        ('{"text": "a"}\n{"body": "b"}', "line 2 has no column 'text'; it has: body"),
        ('{"text": 3}', "line 1: 'text' is 3, not text"),
        ("[1]", "is a list, not an object"),
        ("", "holds no row"),
        ('{"text": ""}\n{"text": null}', "no row with a target"),
        ('{"text": "naïve"}\n', "line 1 has token id 256, outside the model's vocabulary of 256"),
        ("{}", "line 1 has no columns; give it 'text', messages"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "is a chat, but tokenizer byte has no chat template"),
        ('{"input_ids": [[1, 2], [3]]}', "line 1: 'input_ids' is [[1, 2], [3]], not a list of integers"),
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
    if '"text"' in content and "target" not in line and "token id" not in line:
        with pytest.raises(ValueError, match=re.escape(line)):
            open_examples(path, 8, 256, "byte", lazy=True)


def test_a_text_read_on_access_is_named_by_its_line(tmp_path: Path) -> None:
    path = lines(tmp_path / "text.jsonl", {"text": "abc"}, {"text": None}, {"text": ""}, {"text": "naïve"})
    ascii_alone = dataclasses.replace(ByteTokenizer(), vocab_size=300, end_of_document=0)
    with pytest.raises(ValueError, match=f"{path} line 4 has token id 195"):
        open_examples(path, 9, 128, ascii_alone)[1]


def test_a_damaged_parquet_file_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "text.parquet"
    path.write_bytes(b"PAR1 and then nothing")
    assert f"{path} cannot be read as Parquet past row 0" in refusal(path)
    pq.write_table(pa.table({"text": [1], "title": ["a"]}), path)
    assert "row 0: 'text' is 1, not text" in refusal(path)
    offsets = pa.py_buffer(np.array([0, 2, 3], np.int32).tobytes())
    pq.write_table(pa.table({"text": pa.StringArray.from_buffers(2, offsets, pa.py_buffer(b"ab\xff"))}), path)
    assert f"{path} cannot be read as Parquet past row 0: not UTF-8 text (byte 0 is 0xff)" in refusal(path)


@pytest.mark.parametrize(
    ("chat", "line"),
    [
        ("hello", "'messages' is 'hello', not a list of turns"),
        ([{"role": "user"}], "has no role or content"),
        ([CHAT[0], {"role": "assistant", "content": "\ud800"}], "line 1, rendered by the chat template of "),
    ],
)
def test_bad_chats_are_one_line(tmp_path: Path, mistral: Tokenizer, chat: Any, line: str) -> None:
    assert line in refusal(lines(tmp_path / "a.jsonl", {"messages": chat}), mistral)


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
        with pytest.raises(ValueError, match="--chat_template needs a tokenizer with tokens that end a turn, not byte"):
            with_template(source, "byte", TEMPLATE)
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
def test_steps_without_a_target_are_counted_and_no_part_of_the_loss(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"prompt": "p" * 100, "completion": "ab"}, {"prompt": "p", "completion": "no"})
    common = (
        "--model_name_or_path tiny-llama3 --random_init --tokenizer byte --model_max_length 16 --learning_rate 1e-3 "
        f"--data_path {path} --data_cache {tmp_path}/cache --num_train_epochs 1 --save_strategy no"
    )
    flags = {"each": "", "all": "--logging_steps 8", "ranks": "--logging_steps 4 --sequence_parallel_size 1"}
    runs = [f"{common} --output_dir {tmp_path}/{name} {more}" for name, more in flags.items()]
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
    model: Any = SimpleNamespace(config=LlamaConfig(vocab_size=300), tokenizer="byte")
    return len(find_examples(str(path), model, config, SimpleNamespace(is_main=True), evaluates))  # type: ignore[arg-type]


def test_the_limit_of_training_rows_leaves_evaluation_whole(tmp_path: Path) -> None:
    rows = lines(tmp_path / "a.jsonl", *({"text": f"row {i}"} for i in range(5)))
    flags = f"--data_path {rows} --data_cache {tmp_path}/cache --max_train_samples 2"
    assert found(flags, rows, False) == 2
    assert found(f"{flags} --eval_data_path {rows}", rows, True) == 5


def test_a_text_column_applies_to_the_data_with_rows(tmp_path: Path) -> None:
    rows, tokens = lines(tmp_path / "a.jsonl", {"content": "a text"}), tmp_path / "tokens"
    write_token_directory(tokens, [np.arange(5)], 300, dict)
    sources = f"--data_path {rows} --eval_data_path {tokens}"
    flags = f"{sources} --data_cache {tmp_path}/cache --text_column content"
    assert found(flags, rows, False) == found(flags, tokens, True) == 1
    with pytest.raises(ValueError, match="--text_column content applies to rows"):
        found(f"--data_path {tokens} --text_column content", tokens, False)
