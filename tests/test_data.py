"""Facts about what a run reads: labels shifted once, windows inside documents, plain pickles, batches by index."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import resource
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from lightseq.data.batches import BatchStream, open_examples
from lightseq.data.sequences import read_pickle
from lightseq.data.sources import ReadOptions
from lightseq.data.token_directory import open_token_directory, write_token_directory
from lightseq.data.tokenizer import ByteTokenizer, load_tokenizer
from lightseq.models import hub
from lightseq.utils.pickles import load_plain
from lightseq.utils.tensors import IGNORE_INDEX


def token_directory(path: Path, *documents: Sequence[int], vocab_size: int = 1000) -> Path:
    write_token_directory(path, (np.asarray(ids, dtype=np.int64) for ids in documents), vocab_size, dict)
    return path


def pickle_file(path: Path, content: object, protocol: int | None = None) -> Path:
    path.write_bytes(pickle.dumps(content, protocol))
    return path


def jsonl_file(path: Path, *texts: str | None) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def as_lists(examples, index: int) -> tuple[list[int], list[int]]:
    example = examples[index]
    assert example.input_ids.dtype == example.labels.dtype == np.int64
    return example.input_ids.tolist(), example.labels.tolist()


def refusal(*arguments, **keywords) -> str:
    with pytest.raises(ValueError) as caught:
        open_examples(*arguments, **keywords)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_windows_keep_the_target_at_their_border(tmp_path: Path) -> None:
    examples = open_examples(token_directory(tmp_path / "t", range(7)), length=3, vocab_size=1000)
    assert len(examples) == 2  # the third would be the single token 6, which has no target
    assert as_lists(examples, 0) == ([0, 1, 2], [1, 2, 3])
    assert as_lists(examples, 1) == ([3, 4, 5], [4, 5, 6])


def test_the_last_window_of_a_document_ends_without_a_target(tmp_path: Path) -> None:
    examples = open_examples(token_directory(tmp_path / "t", range(5)), length=3, vocab_size=1000)
    assert as_lists(examples, 1) == ([3, 4], [4, IGNORE_INDEX])


def test_every_target_of_every_document_is_in_exactly_one_window_and_no_window_crosses_a_document(
    tmp_path: Path,
) -> None:
    documents = [[10 * d + i for i in range(n)] for d, n in enumerate([5, 1, 9, 2, 4, 8])]
    for length in (1, 2, 3, 4, 20):
        path = token_directory(tmp_path / f"t{length}", *documents)
        examples = open_examples(path, length, vocab_size=1000)
        windows = [as_lists(examples, i) for i in range(len(examples))]
        for ids, labels in windows:
            assert len({token // 10 for token in [*ids, *labels] if token != IGNORE_INDEX}) == 1
        targets = [label for _, labels in windows for label in labels if label != IGNORE_INDEX]
        assert sorted(targets) == sorted(token for ids in documents for token in ids[1:])
        assert examples.notes == (f"{path}: skipped 1 document of fewer than two tokens",)


def test_an_index_past_the_end_is_an_index_error(tmp_path: Path) -> None:
    examples = open_examples(token_directory(tmp_path / "t", range(5)), length=3, vocab_size=1000)
    assert len(list(examples)) == 2  # plain iteration ends there too


def test_the_token_type_is_the_smallest_that_holds_the_vocabulary(tmp_path: Path) -> None:
    for vocab_size, dtype in ((1 << 16, "uint16"), ((1 << 16) + 1, "uint32")):
        path = token_directory(tmp_path / dtype, [0, vocab_size - 1], vocab_size=vocab_size)
        source = open_token_directory(path)
        assert source.meta["dtype"] == dtype and source.document(0).tolist() == [0, vocab_size - 1]


def test_writing_refuses_to_replace_without_force(tmp_path: Path) -> None:
    path = token_directory(tmp_path / "t", [1, 2])
    with pytest.raises(ValueError, match="exists"):
        token_directory(path, [3, 4])
    write_token_directory(path, [np.array([5, 6])], 10, dict, force=True)
    assert open_token_directory(path).document(0).tolist() == [5, 6]
    (path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match=r"thesis\.tex"):
        write_token_directory(path, [np.array([5, 6])], 10, dict, force=True)


def test_leftovers_of_a_killed_process_with_the_same_pid_do_not_stop_a_write(tmp_path: Path) -> None:
    left = tmp_path / f".t.partial-{os.getpid()}"
    left.mkdir()
    path = token_directory(tmp_path / "t", [1, 2])
    assert path.stat().st_mode == left.stat().st_mode, "others may read it"
    write_token_directory(path, [np.array([5, 6])], 10, dict, force=True)
    assert open_token_directory(path).document(0).tolist() == [5, 6]


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = token_directory(tmp_path / "t", [1, 2])
    with pytest.raises(ValueError, match="document 1"):
        write_token_directory(path, [np.array([3, 4]), np.array([10])], 10, dict, force=True)
    assert open_token_directory(path).document(0).tolist() == [1, 2]
    assert [entry.name for entry in tmp_path.iterdir()] == ["t"]


@pytest.mark.parametrize("name", ["tokens.bin", "documents.bin", "meta.json"])
def test_a_corrupt_token_directory_is_one_line_naming_the_file(tmp_path: Path, name: str) -> None:
    path = token_directory(tmp_path / "t", range(9), range(4))
    whole = (path / name).read_bytes()
    (path / name).write_bytes(whole[:-3])
    assert str(path / name) in refusal(path, 4, 1000)
    (path / name).unlink()
    assert name in refusal(path, 4, 1000)


def test_borders_that_fall_are_corrupt(tmp_path: Path) -> None:
    path = token_directory(tmp_path / "t", range(9), range(4))
    np.array([0, 20, 13], dtype="<i8").tofile(path / "documents.bin")
    assert "documents.bin is corrupt" in refusal(path, 4, 1000)


def test_ids_outside_the_vocabulary_are_refused_at_opening(tmp_path: Path) -> None:
    directory = token_directory(tmp_path / "t", [1, 2], [3, 99], [99, 98])
    lists = pickle_file(tmp_path / "p.pkl", {"input_ids": [[1, 2], [3, 99]]})
    negative = pickle_file(tmp_path / "n.pkl", {"input_ids": [[1, -5, 2]]})
    labels = pickle_file(tmp_path / "l.pkl", {"input_ids": [[1, 2]], "labels": [[-100, 99]]})
    text = jsonl_file(tmp_path / "text.jsonl", "ab")
    assert f"{directory} has token id 99" in refusal(directory, 4, 99)
    assert "sequence 1 has token id 99" in refusal(lists, 4, 99)
    assert "token id -5" in refusal(negative, 4, 99)
    assert "labels 0 has token id 99" in refusal(labels, 4, 99)
    assert f"{text} line 1 has token id 256" in refusal(text, 4, 256, tokenizer="byte")
    cached = {"lazy": False, "read_options": ReadOptions(cache=tmp_path / "cache")}
    assert "line 1 has token id 256" in refusal(text, 4, 256, tokenizer="byte", **cached)


@pytest.mark.parametrize("key", ["dtype", "tokens", "documents", "max_token_id", "tokenizer", "targets"])
@pytest.mark.parametrize("value", [None, True, -1, "x", [], {}, [3], [{"document": []}], {"a": 1}], ids=str)
def test_a_meta_file_of_odd_types_is_read_or_one_line(tmp_path: Path, key: str, value: object) -> None:
    path = token_directory(tmp_path / "t", range(7))
    meta = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps(meta | {key: value}))
    try:
        open_examples(path, 3, 1000)
    except ValueError as error:
        assert " is corrupt: " in str(error) and "\n" not in str(error)


def test_a_token_directory_whose_meta_lies_about_its_ids_is_caught_at_the_example(tmp_path: Path) -> None:
    path = token_directory(tmp_path / "t", [1, 2, 3], [4, 5, 6, 7, 99])  # 99 is a label only, one past its window
    meta = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps(meta | {"max_token_id": 5}))
    examples = open_examples(path, 4, vocab_size=10)
    with pytest.raises(ValueError, match="document 1 has token id 99"):
        examples[1]


def test_a_pickle_is_one_example_a_sequence_cut_and_counted(tmp_path: Path) -> None:
    path = pickle_file(tmp_path / "data.pkl", {"input_ids": [[1, 2, 3, 4, 5], [6, 7], [8]], "source": "somewhere"})
    examples = open_examples(path, length=3, vocab_size=10)
    assert len(examples) == 2
    assert as_lists(examples, 0) == ([1, 2, 3], [2, 3, 4])  # 4 is cut off as an input, and still is a target
    assert as_lists(examples, 1) == ([6, 7], [7, IGNORE_INDEX])
    assert examples.notes == (
        f"{path}: skipped 1 sequence of fewer than two tokens",
        f"{path}: truncated 1 sequence of 2 to 3 tokens, 2 tokens dropped",
    )


def test_a_pickle_may_hold_a_mask_that_hides_nothing(tmp_path: Path) -> None:
    content = {"input_ids": [[1, 2, 3]], "attention_mask": [[1, 1, 1]]}
    assert as_lists(open_examples(pickle_file(tmp_path / "data.pkl", content), 4, 10), 0)[0] == [1, 2, 3]


def test_labels_of_a_pickle_are_shifted_once(tmp_path: Path) -> None:
    content = {"input_ids": [[1, 2, 3, 4, 5]], "labels": [[-100, -100, 3, 4, 5]]}
    examples = open_examples(pickle_file(tmp_path / "data.pkl", content), length=4, vocab_size=10)
    assert as_lists(examples, 0) == ([1, 2, 3, 4], [IGNORE_INDEX, 3, 4, 5])


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_runs_no_code(tmp_path: Path, protocol: int) -> None:
    path, trap = tmp_path / "data.pkl", tmp_path / "trap"
    path.write_bytes(pickle.dumps({"input_ids": [[1, 2]], "x": Malicious(trap)}, protocol))
    assert "it builds" in refusal(path, 4, 10) and not trap.exists()
    pickle.loads(path.read_bytes())  # the trap works
    assert trap.exists()


NEST = b"\x85" * 300_000  # tuples of one tuple each
DOUBLE = b"q\x00h\x00\x86" * 60  # tuples that hold the one before twice


@pytest.mark.parametrize("memo", [b"r" + (2**32 - 1).to_bytes(4, "little"), b"p4294967295\n"])
def test_a_large_memo_index_costs_nothing(tmp_path: Path, memo: bytes) -> None:
    """Python's unpickler would allocate 64 GiB for the seven bytes."""
    path = tmp_path / "data.pkl"
    path.write_bytes(b"}" + memo + b".")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "is not a dict with" in refusal(path, 4, 10)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18  # KiB


@pytest.mark.parametrize("key", [b")" + NEST, b")" + DOUBLE], ids=["deep", "shared"])
def test_a_tuple_as_a_key_is_refused_before_it_is_hashed(tmp_path: Path, key: bytes) -> None:
    """The hash of the first would overflow the stack, that of the second never end."""
    path = tmp_path / "data.pkl"
    path.write_bytes(b"\x80\x04}" + key + b"Ns.")
    assert "a dict key is a tuple" in refusal(path, 4, 10)


def test_lists_that_hold_each_other_many_times_over_are_refused(tmp_path: Path) -> None:
    path, row = tmp_path / "data.pkl", [1]
    for _ in range(40):
        row = [row, row]  # type: ignore[list-item]
    pickle_file(path, {"input_ids": [row]})
    assert "is not a list of integers" in refusal(path, 4, 10)


def test_a_pipe_is_no_pickle(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "data.pkl")
    assert "not a regular file" in refusal(tmp_path / "data.pkl", 4, 10)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_of_any_protocol_is_read(tmp_path: Path, protocol: int) -> None:
    rows = [[1, 300, 70_000, 2], [5] * 3000, [], [-1, 2**40]]
    others = {"ids": ["ä", "x" * 300], "notes": [0.5, None, True, False], "seed": 2**70, "source": b"\x00r"}
    for content in (
        {"input_ids": rows, **others},
        {"input_ids": tuple(map(tuple, rows)), "meta": [{"a": 1}, {"a": (2, 3, 4, 5)}]},
    ):
        if protocol < 3:
            content.pop("source", None)
        path = pickle_file(tmp_path / "data.pkl", content, protocol)
        assert [ids.tolist() for ids, _ in read_pickle(path)] == rows
        assert load_plain(path) == content


def test_a_pickle_of_arrays_is_refused_by_name(tmp_path: Path) -> None:
    path = pickle_file(tmp_path / "data.pkl", {"input_ids": [np.array([1, 2])]})
    assert "numpy" in refusal(path, 4, 10)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_truncated_pickle_is_one_line(tmp_path: Path, protocol: int) -> None:
    whole = pickle.dumps({"input_ids": [[1, 2, 300, 70000]], "s": "text", "f": 0.5}, protocol)
    path = tmp_path / "data.pkl"
    for cut in range(len(whole) - 1):
        path.write_bytes(whole[:cut])
        assert str(path) in refusal(path, 4, 100000)


@pytest.mark.parametrize(
    "damaged",
    [
        b"cos\nsystem\n(S'true'\ntR.",  # GLOBAL, REDUCE
        b"(S'true'\nios\nsystem\n.",  # INST
        b"\x80\x04\x8c\x02os\x8c\x06system\x93.",  # STACK_GLOBAL
        b"\x82\x01.",  # EXT1: a registered extension
        b"P1\n.",  # PERSID: an object outside the file
        b"K\x01K\x02R.",  # REDUCE of a number
        b"S'int'\n)\x81.",  # NEWOBJ of a string
        b"]}S'a'\nK\x01sb.",  # BUILD of a list
        b"}]K\x01s.",  # a list as a key
        b"h\x07.",  # a memo that was never set
        b"Xtoo little.",
        b"not a pickle",
    ],
)
def test_a_damaged_or_hostile_pickle_is_one_line(tmp_path: Path, damaged: bytes) -> None:
    path = tmp_path / "data.pkl"
    path.write_bytes(damaged)
    assert "cannot be read as a pickle" in refusal(path, 4, 10)


@pytest.mark.parametrize(
    "content",
    [
        [[1, 2]],
        {"ids": [[1, 2]]},
        {"input_ids": [1, 2]},
        {"input_ids": ["text"]},
        {"input_ids": [[1.5, 2.0]]},
        {"input_ids": [[True, False]]},
        {"input_ids": [[[1, 2], [3]]]},
        {"input_ids": [[1, 1 << 70]]},
        {"input_ids": [[1, 2]], "labels": [[1, 2], [3]]},
        {"input_ids": [[1, 2]], "labels": [[1]]},
        {"input_ids": [[1, 2]], "attention_mask": [[1, 1], [1]]},
        {"input_ids": [[3, 4], [1, 0]], "attention_mask": [[1, 1], [1, 0]]},
        {"input_ids": []},
        {"input_ids": [[], [1]]},
    ],
)
def test_a_pickle_of_another_shape_is_one_line(tmp_path: Path, content: object) -> None:
    path = pickle_file(tmp_path / "data.pkl", content)
    assert str(path) in refusal(path, 4, 10)


def test_byte_tokens_go_there_and_back() -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode("naïve ∑")
    assert ids[-1] == 256 and ids.max() < tokenizer.vocab_size and tokenizer.decode(ids) == "naïve ∑"


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_text_is_cut_on_access_or_split_into_windows_beforehand(tmp_path: Path, lazy: bool, kind: str) -> None:
    path = tmp_path / f"text.{kind}"
    if kind == "parquet":
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        pq.write_table(pa.table({"text": ["abcd", None, "", "e"]}), path)
    else:
        jsonl_file(path, "abcd", None, "", "e")
    examples = open_examples(path, 3, 300, "byte", lazy, read_options=ReadOptions(cache=tmp_path / "cache"))
    assert as_lists(examples, 0) == (list(b"abc"), list(b"bcd"))
    assert as_lists(examples, len(examples) - 1) == ([ord("e"), 256], [256, IGNORE_INDEX])
    notes = "\n".join(examples.notes)
    assert "skipped rows: 2 empty (" in notes and f"{path} {'row 1' if kind == 'parquet' else 'line 2'}: empty" in notes
    if lazy:
        assert len(examples) == 2 and "tokenized on access" in notes
    else:
        assert as_lists(examples, 1) == ([ord("d"), 256], [256, IGNORE_INDEX])
        assert "1 row of more than 3 tokens split into windows" in notes


def test_a_text_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    for content, said in (
        ('{"text": "a"}\n{oops\n', "line 2"),
        ('{"body": 1}', "body"),
        ('{"text": 3}', "3"),
        ("", "no"),
        ('{"text": "a"}\n{"text": "bc\\ud800"}', "text.jsonl line 2: character 2 is \\ud800, an unpaired surrogate"),
    ):
        path.write_text(content)
        assert said in refusal(path, 4, 300, tokenizer="byte")
    path.write_text('{"text": "a"}')
    assert "--tokenizer" in refusal(path, 4, 300)
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "text.parquet"
    path.write_bytes(b"PAR1 and then nothing")
    assert str(path) in refusal(path, 4, 300, tokenizer="byte")
    pq.write_table(pa.table({"text": [1], "title": ["a"]}), path)
    assert "row 0: 'text' is 1, not text" in refusal(path, 4, 300, tokenizer="byte")
    offsets = pa.py_buffer(np.array([0, 2, 3], np.int32).tobytes())
    pq.write_table(pa.table({"text": pa.StringArray.from_buffers(2, offsets, pa.py_buffer(b"ab\xff"))}), path)
    assert f"{path} cannot be read as Parquet past row 0: 'utf-8' codec" in refusal(path, 4, 300, tokenizer="byte")


def test_a_text_read_on_access_is_named_by_its_line(tmp_path: Path) -> None:
    path = jsonl_file(tmp_path / "text.jsonl", "abc", None, "", "na\u00efve")
    ascii_alone = dataclasses.replace(ByteTokenizer(), vocab_size=300, end_of_document=0)
    with pytest.raises(ValueError, match=f"{path} line 4 has token id 195"):
        open_examples(path, 9, 128, ascii_alone)[1]


def test_a_path_that_is_no_data_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "data.csv.zst").write_text("a,b")
    assert "does not exist" in refusal(tmp_path / "nothing", 4, 10)
    assert "is not a token directory" in refusal(tmp_path / "data.csv.zst", 4, 10)
    assert "neither a token directory" in refusal(tmp_path, 4, 10)


def test_a_hugging_face_tokenizer_ends_every_document(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "long": 2, "sequence": 7}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", unk_token="<unk>").save_pretrained(
        tmp_path / "tok"
    )
    tokenizer = load_tokenizer(str(tmp_path / "tok"))
    assert tokenizer.encode("long long sequence").tolist() == [2, 2, 7, 1]
    assert tokenizer.vocab_size == 8 and tokenizer.decode([2, 7, 1]) == "long sequence"
    with pytest.raises(ValueError, match="nowhere"):
        load_tokenizer(str(tmp_path / "nowhere"))


def test_a_hub_that_does_not_answer_for_a_tokenizer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def unanswered(url: str, timeout: float) -> None:
        raise RuntimeError("Name or service not known.\nRetrying.")

    monkeypatch.setattr(hub, "get_hf_file_metadata", unanswered)
    with pytest.raises(ValueError, match=r"^tokenizer a/b .*\(RuntimeError: Name or service not known\); .*byte$"):
        load_tokenizer("a/b")


def stream(tmp_path: Path, count: int = 10, **keywords) -> BatchStream:
    path = tmp_path / "stream.pkl"
    pickle_file(path, {"input_ids": [[i, i, i][: 2 + i % 2] for i in range(count)]})
    return BatchStream(open_examples(path, 4, 100), length=4, **keywords)


def firsts(stream: BatchStream, steps: range) -> list[int]:
    """The first id of every sequence, in the order that ranks and accumulation define; -1 for an empty one."""
    found = []
    for step in steps:
        for accumulation_index in range(stream.accumulation):
            for rank in range(stream.data_ranks):
                batch = stream.batch(step, accumulation_index, rank)
                empty = (batch.labels == IGNORE_INDEX).all(dim=1)
                found += [-1 if e else int(i) for e, i in zip(empty, batch.input_ids[:, 0], strict=True)]
    return found


def test_a_batch_is_right_padded_and_counts_its_targets(tmp_path: Path) -> None:
    batch = stream(tmp_path, batch_size=2, shuffle=False, data_ranks=2).batch(0, data_rank=1)
    assert batch.input_ids.tolist() == [[2, 2, 0, 0], [3, 3, 3, 0]]
    assert batch.labels.tolist() == [[2, -100, -100, -100], [3, 3, -100, -100]]
    assert batch.valid_tokens == 3


def test_ranks_and_accumulation_read_the_examples_in_order(tmp_path: Path) -> None:
    ordered = stream(tmp_path, count=12, batch_size=2, data_ranks=3, accumulation=2, shuffle=False, epochs=2)
    assert ordered.sequences_per_step == 12 and ordered.steps == 2
    assert firsts(ordered, range(2)) == [*range(12), *range(12)]


def test_every_epoch_reads_every_example_once_in_its_own_order(tmp_path: Path) -> None:
    shuffled = stream(tmp_path, batch_size=5, epochs=3, seed=7)
    epochs = [firsts(shuffled, range(start, start + 2)) for start in (0, 2, 4)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert firsts(stream(tmp_path, batch_size=5, epochs=3, seed=8), range(2)) != epochs[0]


def test_the_last_step_is_filled_up_with_empty_sequences(tmp_path: Path) -> None:
    ordered = stream(tmp_path, count=5, batch_size=2, data_ranks=2, shuffle=False, epochs=1)
    assert ordered.steps == 2 and ordered.epochs_after(2) == 1.0
    assert firsts(ordered, range(2)) == [0, 1, 2, 3, 4, -1, -1, -1]
    assert ordered.batch(1, data_rank=1).valid_tokens == 0


def test_a_fraction_of_an_epoch_is_a_fraction_of_the_examples(tmp_path: Path) -> None:
    assert stream(tmp_path, batch_size=1, epochs=0.3).steps == 3
    assert stream(tmp_path, batch_size=1, epochs=1.5).epochs_after(12) == 1.2


def test_an_endless_stream_goes_on_into_the_next_epoch(tmp_path: Path) -> None:
    endless = stream(tmp_path, count=3, batch_size=2, shuffle=False)
    assert firsts(endless, range(4)) == [0, 1, 2, 0, 1, 2, 0, 1]


def test_a_batch_depends_on_its_index_alone(tmp_path: Path) -> None:
    first = stream(tmp_path, batch_size=2, data_ranks=2, accumulation=2, seed=3)
    in_order = [first.batch(step, a, rank) for step in range(4) for a in range(2) for rank in range(2)]
    resumed = stream(tmp_path, batch_size=2, data_ranks=2, accumulation=2, seed=3).batch(3, 1, 0)
    assert resumed.input_ids.equal(in_order[14].input_ids) and resumed.labels.equal(in_order[14].labels)


def test_another_split_of_the_same_step_reads_the_same_sequences(tmp_path: Path) -> None:
    wide = stream(tmp_path, batch_size=1, data_ranks=4, seed=3)
    narrow = stream(tmp_path, batch_size=2, accumulation=2, seed=3)
    assert firsts(wide, range(5)) == firsts(narrow, range(5))


def ids_of(stream: BatchStream, steps: range) -> list[int]:
    """The first token of every sequence of some steps, in the order of the line."""
    found = []
    for step in steps:
        for a in range(stream.accumulation):
            for d in range(stream.data_ranks):
                found += stream.batch(step, a, d).input_ids[:, 0].tolist()
    return found


HERE = Path("/somewhere")


def test_a_run_resumed_with_other_ranks_skips_and_repeats_nothing(tmp_path: Path) -> None:
    examples = open_examples(token_directory(tmp_path / "t", *([i, i] for i in range(1, 41))), 2, 1000)
    before = BatchStream(examples, 2, 1, data_ranks=3, accumulation=2, epochs=1)
    line = ids_of(before, range(before.steps))
    for data_ranks, accumulation, batch_size in ((3, 2, 1), (1, 3, 2), (1, 6, 1), (4, 1, 2), (1, 1, 1)):
        after = BatchStream(examples, 2, batch_size, data_ranks, accumulation, epochs=1)
        resumed, notes = after.resume_at(4, before.state(4), HERE)
        rest = ids_of(resumed, range(4, resumed.steps))
        assert ids_of(before, range(4)) + [i for i in rest if i] == [i for i in line if i] and sorted(line)[-40:] == [
            *range(1, 41)
        ]
        assert len(notes) == (after.sequences_per_step != 6)
        assert resumed.epochs_after(resumed.steps) == 1 and resumed.state(resumed.steps)["places"] >= 40
        older = {key: value for key, value in before.state(4).items() if key != "sequences_per_step"}
        assert after.resume_at(4, older, HERE) == (resumed, notes)
    again, notes = after.resume_at(10, resumed.state(10), HERE)  # of one that was resumed before
    assert notes == (), "nothing is another since then"
    assert ids_of(again, range(10, 12)) == ids_of(resumed, range(10, 12))


def test_a_finished_run_that_is_extended_skips_no_example_of_the_next_epoch(tmp_path: Path) -> None:
    examples = open_examples(token_directory(tmp_path / "t", *([i, i] for i in range(1, 11))), 2, 1000)
    once, twice = (BatchStream(examples, 2, 4, epochs=epochs) for epochs in (1, 2))  # 10 examples, 4 a step
    extended, _ = twice.resume_at(once.steps, once.state(once.steps), HERE)
    assert sorted(i for i in ids_of(extended, range(once.steps, extended.steps)) if i) == [*range(1, 11)]


def test_a_run_resumed_with_other_data_is_refused(tmp_path: Path) -> None:
    examples = open_examples(token_directory(tmp_path / "t", [1, 2], [3, 4]), 2, 1000)
    stream = BatchStream(examples, 2, 1)
    for change, line in (
        ({"examples": 3000}, "/somewhere was trained on 3,000 examples, not on 2 examples; resume"),
        ({"seed": 7000}, "with --seed 7000, not with --seed 0; resume"),
    ):
        with pytest.raises(ValueError, match=line):
            stream.resume_at(1, stream.state(1) | change, HERE)


def test_a_run_resumed_with_as_much_other_data_is_refused(tmp_path: Path) -> None:
    texts = [f"text {i}" for i in range(40)]
    before = BatchStream(open_examples(jsonl_file(tmp_path / "a.jsonl", *texts), 9, 300, "byte"), 9, 1)
    other = BatchStream(
        open_examples(jsonl_file(tmp_path / "b.jsonl", *(t[::-1] for t in texts)), 9, 300, "byte"), 9, 1
    )
    with pytest.raises(ValueError, match="trained on other data with as many examples"):
        other.resume_at(1, before.state(1), HERE)
    moved = open_examples(
        jsonl_file(tmp_path / "c.jsonl", *texts),
        9,
        300,
        "byte",
        False,
        read_options=ReadOptions(cache=tmp_path / "cache"),
    )
    assert BatchStream(moved, 9, 1).resume_at(1, before.state(1), HERE)[1] == (), "the same, wherever it lies"
    older = {key: value for key, value in before.state(1).items() if key != "fingerprint"}
    assert other.resume_at(1, older, HERE)[0].first_sample == 1


def test_a_sequence_without_a_target_is_left_out_and_counted(tmp_path: Path) -> None:
    content = {"input_ids": [[1, 2, 3], [4, 5, 6]], "labels": [[-100, -100, -100], [-100, -100, 6]]}
    path = pickle_file(tmp_path / "p.pkl", content)
    examples = open_examples(path, 3, 10)
    assert len(examples) == 1 and "skipped 1 sequence without a target in the first 3 tokens" in examples.notes[0]
    assert "every label is -100" in refusal(path, 1, 10)
