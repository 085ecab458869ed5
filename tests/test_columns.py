"""Columns of rows and keys of turns: used as their formats mean them, or refused by name."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byte_level import Document, byte_level, open_path, read_path, read_rows, write_rows

from lightseq.data.column_flags import renamed_columns
from lightseq.data.columns import ROLES, UNSUPPORTED
from lightseq.data.sources import names_for
from lightseq.data.tokenizer import ByteTokenizer

pytestmark = pytest.mark.usefixtures("rendered_here")

USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
BAD, WELL = {"role": "assistant", "content": "BAD"}, {"role": "assistant", "content": "well"}
CHAT_ROW = {"messages": [USER, ANSWER]}
LEARNT = ["yo<|im_end|>\n"]


def refusal(folder: Path, *rows: dict[str, Any]) -> str:
    with pytest.raises(ValueError) as caught:
        read_rows(folder, byte_level(), *rows)
    assert "\n" not in str(caught.value) and " line " in str(caught.value)
    return str(caught.value)


def one(folder: Path, row: dict[str, Any], **options: Any) -> Document:
    (found,) = read_rows(folder, byte_level(), row, **options)
    return found


# ---- columns --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", sorted(UNSUPPORTED))
def test_columns_that_would_change_what_is_learnt_are_refused_by_name(tmp_path: Path, column: str) -> None:
    for number, row in enumerate((CHAT_ROW, {"prompt": "hi", "completion": "yo"})):
        folder = tmp_path / str(number)
        folder.mkdir()
        said = refusal(folder, row, {**row, column: False})
        assert f"line 2: column {column!r} {UNSUPPORTED[column]}; remove it, or give --ignore_columns" in said


def test_unknown_columns_are_refused_unless_they_are_ignored(tmp_path: Path) -> None:
    for row in (CHAT_ROW, {"prompt": "hi", "completion": "yo"}, {"text": "yo"}, {"input_ids": [5, 6]}):
        said = refusal(tmp_path, {**row, "mystery": 1})
        assert "column 'mystery' is not known beside " in said and "give --ignore_columns mystery" in said
        assert "--ignore_columns" not in refusal(tmp_path, {**row, "a,b": 1}), "which would name two"
        ignored = one(tmp_path, {**row, "mystery": 1}, ignored_columns=("mystery",))
        assert ignored == one(tmp_path, row) == one(tmp_path, {**row, "mystery": None}), "null counts as absent"
        assert one(tmp_path, {**row, "id": 7, "source": "web", "metadata": {"a": 1}, "url": "x"}) == ignored


def test_columns_are_read_under_other_names(tmp_path: Path) -> None:
    names = renamed_columns("prompt=question, completion=answer")
    row = {"question": "hi", "answer": "yo"}
    assert one(tmp_path, row, renamed_columns=names) == one(tmp_path, {"prompt": "hi", "completion": "yo"})
    swapped = {"prompt": "yo", "completion": "hi"}
    names = renamed_columns("prompt=completion,completion=prompt")
    assert one(tmp_path, swapped, renamed_columns=names) == one(tmp_path, {"prompt": "hi", "completion": "yo"})


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"querstion": "hi", "answer": "yo"}, "has no column 'question', which --columns reads as 'prompt'; it has: "),
        ({"question": "hi", "prompt": "a", "answer": "yo"}, "has 'prompt' beside 'question', which --columns reads as"),
        ({"prompt": "hi", "completion": "yo"}, "--columns takes new name=column: question=prompt"),
    ],
)
def test_columns_that_cannot_be_renamed_are_refused(tmp_path: Path, row: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        one(tmp_path, row, renamed_columns=renamed_columns("prompt=question,completion=answer"))


def test_a_mixture_takes_the_names_where_the_columns_are(tmp_path: Path) -> None:
    names = renamed_columns("prompt=q,completion=a")
    chats = write_rows(tmp_path / "chats.jsonl", {"messages": []})
    answers, half = (write_rows(tmp_path / f"{i}.jsonl", dict.fromkeys(i, "")) for i in ("qa", "q"))
    texts = tmp_path / "texts.txt"
    texts.write_text("text")
    sources = [str(path) for path in (chats, answers, half, texts)]
    assert [names_for(source, sources, names) for source in sources] == [{}, names, names, {}]
    for alone in ([str(chats)], [str(chats), str(texts)]):  # refused later: no source has the columns
        assert names_for(str(chats), alone, names) == names


@pytest.mark.parametrize("pairs", ["", "prompt", "prompt=", "=question", "a=b,a=c", "a=b,c=b"])
def test_columns_are_given_in_pairs(pairs: str) -> None:
    with pytest.raises(ValueError, match=f"--columns '{pairs}'"):
        renamed_columns(pairs)


def test_columns_that_repeat_the_row_are_known_from_others(tmp_path: Path) -> None:
    pair = {"instruction": "hi", "input": "", "output": "yo"}
    wrapped = "Below is an instruction.\n\n### Instruction:\nhi\n\n### Response:\nyo"
    assert one(tmp_path, {**pair, "text": wrapped}) == one(tmp_path, pair)
    assert one(tmp_path, {**CHAT_ROW, "prompt": "hi"}) == one(tmp_path, CHAT_ROW)
    assert one(tmp_path, {**CHAT_ROW, "conversations": [{"from": "human", "value": "hi"}]}).targets == LEARNT
    assert one(tmp_path, {"input_ids": [5, 6, 7], "text": "made from this"}).ids == [5, 6, 7]
    assert one(tmp_path, {"input_ids": None, "text": "yo"}).text == "yo<eos>", "null counts as absent"
    for row in ({**pair, "text": "other"}, {**CHAT_ROW, "prompt": "other"}, {**CHAT_ROW, "text": "other"}):
        assert "differs from" in refusal(tmp_path, row)
    named = one(tmp_path, {"body": "other", **CHAT_ROW}, text_column="body")
    assert named.text == "other<eos>", "--text_column decides"


def test_a_class_or_a_quality_score_beside_text_changes_nothing(tmp_path: Path) -> None:
    assert one(tmp_path, {"text": "yo", "label": 1, "score": 3.5}).text == "yo<eos>"
    assert "holds preferences" in refusal(tmp_path, {"text": "yo", "label": False})


def test_the_system_prompt_and_earlier_turns_of_a_row_are_in_its_text(tmp_path: Path) -> None:
    system = {"role": "system", "content": "BE TERSE"}
    want = one(tmp_path, {"messages": [system, USER, ANSWER]})
    sharegpt = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]}
    for row in (CHAT_ROW, sharegpt, {"instruction": "hi", "input": "", "output": "yo"}):
        for column in ("system", "system_prompt"):
            assert one(tmp_path, {**row, column: "BE TERSE"}) == want
    assert one(tmp_path, {"messages": [system, USER, ANSWER], "system": "BE TERSE"}) == want
    said = refusal(tmp_path, {"messages": [system, USER, ANSWER], "system": "BE VERBOSE"})
    assert "column 'system' differs from the system turn" in said
    earlier = {"instruction": "and?", "output": "well", "history": [["hi", "yo"]]}
    turns = [USER, ANSWER, {"role": "user", "content": "and?"}, WELL]
    assert one(tmp_path, earlier) == one(tmp_path, {"messages": turns})
    assert "'history' is ['hi'], not a list of pairs" in refusal(tmp_path, {**earlier, "history": ["hi"]})
    dolly = {"instruction": "hi", "context": "there", "response": "yo", "category": "qa"}
    assert "hi\n\nthere<|im_end|>" in one(tmp_path, dolly).text


def test_without_a_chat_template_columns_that_need_one_are_refused(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", {"prompt": "hi", "completion": "yo", "system": "BE TERSE"})
    with pytest.raises(ValueError, match="has column 'system', which needs a chat template"):
        open_path(path, ByteTokenizer())


# ---- turns ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["weight", "train", "training", "loss", "loss_weight"])
def test_an_answer_that_a_turn_masks_is_context(tmp_path: Path, key: str) -> None:
    for masked, learnt in ((0, 1), (False, True), (0.0, 1.0)):
        row = {"messages": [USER, {**BAD, key: masked}, USER, {**WELL, key: learnt}]}
        found = one(tmp_path, row)
        assert found.targets == ["well<|im_end|>\n"] and "BAD" in found.text
    assert f"has {key} 0.5; give 1" in refusal(tmp_path, {"messages": [USER, {**ANSWER, key: 0.5}]})
    assert "its role is user; only answers are learnt" in refusal(tmp_path, {"messages": [{**USER, key: 1}, ANSWER]})
    sharegpt = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "BAD", key: False}]
    with pytest.raises(ValueError, match="no row with a target"):
        one(tmp_path, {"conversations": sharegpt})


def test_answers_inside_a_prompt_are_no_targets(tmp_path: Path) -> None:
    row = {"prompt": [USER, BAD, USER], "completion": [WELL]}
    assert one(tmp_path, row).targets == ["well<|im_end|>\n"]
    assert one(tmp_path, {"prompt": [USER, BAD, USER], "completion": "well"}) == one(tmp_path, row)


def test_columns_that_would_follow_a_prompt_of_text_are_refused_beside_turns(tmp_path: Path) -> None:
    row = {"prompt": [USER], "completion": [ANSWER]}
    assert one(tmp_path, {**row, "input": "", "text": "yo"}) == one(tmp_path, row)
    for column, value in (("input", "more"), ("context", "more"), ("history", [["a", "b"]])):
        assert f"column '{column}' cannot be joined to 'prompt'" in refusal(tmp_path, {**row, column: value})
    assert "column 'text' differs from prompt and completion" in refusal(tmp_path, {**row, "text": "other"})


def test_every_role_is_mapped_or_refused(tmp_path: Path) -> None:
    for role, meaning in ROLES.items():
        content = '{"name": "weather"}' if role in ("function_call", "tool_call") else "said"
        for name in (role, role.capitalize()) if role == "user" else (role,):
            found = one(tmp_path, {"messages": [USER, {"role": name, "content": content}, USER, ANSWER]})
            assert (len(found.targets) == 2) == (meaning == "assistant")
            shown = "system" if meaning == "developer" else meaning
            assert f"<|im_start|>{shown}\n" in found.text
    assert "has the role 'critic', which is not known; give it one of: ai, assistant" in refusal(
        tmp_path, {"messages": [USER, {"role": "critic", "content": "no"}, ANSWER]}
    )


def test_calls_of_sharegpt_and_of_older_openai_rows_are_targets(tmp_path: Path) -> None:
    call = {"name": "weather", "arguments": {"city": "Paris"}}
    turn = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
    want = one(tmp_path, {"messages": [USER, turn, {"role": "tool", "content": "rain"}, ANSWER]})
    assert len(want.targets) == 2 and "weather" in want.targets[0]
    sharegpt = [
        {"from": "human", "value": "hi"},
        {"from": "function_call", "value": json.dumps(call)},
        {"from": "observation", "value": "rain"},
        {"from": "gpt", "value": "yo"},
    ]
    assert one(tmp_path, {"conversations": sharegpt, "tools": "[]"}) == want
    older = [USER, {"role": "assistant", "content": None, "function_call": {**call, "arguments": '{"city": "Paris"}'}}]
    assert one(tmp_path, {"messages": [*older, {"role": "function", "content": "rain"}, ANSWER]}) == want
    sharegpt[1]["value"] = "weather in Paris"
    assert "is a function call, but 'weather in Paris' is not JSON" in refusal(tmp_path, {"conversations": sharegpt})


def test_parts_of_text_are_joined_and_others_refused(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "y", "image_url": None}, {"type": "text", "text": "o"}]
    assert one(tmp_path, {"messages": [USER, {"role": "assistant", "content": parts}]}) == one(tmp_path, CHAT_ROW)
    image = [{"type": "image_url", "image_url": {"url": "x"}}, *parts]
    said = refusal(tmp_path, {"messages": [{"role": "user", "content": image}, ANSWER]})
    assert "has a part of type 'image_url'; lightseq train reads text only" in said
    assert "has the content 3, not text" in refusal(tmp_path, {"messages": [{"role": "user", "content": 3}, ANSWER]})


def test_unknown_keys_of_turns_are_refused_and_harmless_ones_left_out(tmp_path: Path) -> None:
    named = {"messages": [{**USER, "name": "Ada", "id": 3}, {**ANSWER, "tool_calls": None, "prefix": None}]}
    assert one(tmp_path, named) == one(tmp_path, CHAT_ROW)
    assert "does not read 'prefix' of a turn" in refusal(tmp_path, {"messages": [USER, {**ANSWER, "prefix": True}]})


# ---- tokens ---------------------------------------------------------------------------------------------------------


def test_masks_of_targets_are_used_and_combined(tmp_path: Path) -> None:
    ids, mask = list(range(40, 60)), [0] * 15 + [1] * 5
    for name in ("completion_mask", "assistant_masks", "loss_mask"):
        for values in (mask, [bool(x) for x in mask]):
            assert one(tmp_path, {"input_ids": ids, name: values}).mask == [bool(x) for x in mask]
        assert f"'{name}' is [0, 2" in refusal(tmp_path, {"input_ids": ids, name: [0, 2] * 10})
        assert "not a 0 or 1 for each of the 20 input_ids" in refusal(tmp_path, {"input_ids": ids, name: [1]})
    both = one(tmp_path, {"input_ids": ids, "completion_mask": mask, "assistant_masks": [0] * 17 + [1] * 3})
    assert sum(both.mask) == 3


@pytest.mark.parametrize("name", ["labels", "completion_mask", "assistant_masks", "loss_mask"])
def test_every_row_has_a_mask_of_targets_or_none_has(tmp_path: Path, name: str) -> None:
    """Without its mask, a row would train on every token of its prompt."""
    datasets = pytest.importorskip("datasets")
    ids = list(range(40, 60))
    masked = {"input_ids": ids, name: [-100] * 5 + ids[5:] if name == "labels" else [0] * 5 + [1] * 15}
    for plain in ({"input_ids": ids}, {"input_ids": ids, name: None}):
        assert f"line 2 has {name}, but the first row has none" in refusal(tmp_path, plain, masked)
        assert "line 2 has no labels or mask, but the first row has; give" in refusal(tmp_path, masked, plain)
    datasets.Dataset.from_list([masked, plain]).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="row 1 has no labels or mask, but the first row has"):
        open_path(tmp_path / "a.parquet", byte_level())
    found = read_rows(tmp_path, byte_level(), plain, plain)
    assert [one.mask for one in found] == [[True] * 20] * 2, "a column of nulls alone"
    empty = {"input_ids": [], name: None}
    assert len(read_rows(tmp_path, byte_level(), masked, empty, masked)) == 2


@pytest.mark.parametrize(
    "column",
    [
        {"position_ids": [0, 1, 2, 0, 1, 0, 1, 2]},
        {"seq_lengths": [3, 2, 3]},
        {"cu_seqlens": [0, 3, 5, 8]},
        {"seq_idx": [0, 0, 0, 1, 1, 2, 2, 2]},
    ],
)
def test_packed_rows_are_split_into_their_documents(tmp_path: Path, column: dict[str, list[int]]) -> None:
    row = {"input_ids": [11, 12, 13, 21, 22, 31, 32, 33], "labels": [-100, 12, 13, 21, 22, -100, -100, 33], **column}
    found = read_rows(tmp_path, byte_level(), row)
    assert [one.ids for one in found] == [[11, 12, 13], [21, 22], [31, 32, 33]]
    assert [one.mask for one in found] == [[False, True, True], [True, True], [False, False, True]]
    ((name, values),) = column.items()
    bad = {name: [*values[:-1], values[-1] + 5]}
    assert f"'{name}' is " in refusal(tmp_path, {**row, **bad})
    path = write_rows(tmp_path / "again.jsonl", row)
    assert any("a packed row is split into its documents" in note for note in open_path(path, byte_level()).notes)


def test_columns_that_divide_a_row_differently_are_refused(tmp_path: Path) -> None:
    row = {"input_ids": [1, 2, 3, 4], "seq_lengths": [2, 2], "position_ids": [0, 1, 2, 0]}
    assert "position_ids and seq_lengths differ in where documents begin" in refusal(tmp_path, row)
    plain = {"input_ids": [5, 6, 7], "position_ids": [0, 1, 2], "token_type_ids": [0, 0, 0]}
    assert one(tmp_path, plain).ids == [5, 6, 7]
    padded = {"input_ids": [5, 6, 7, 0, 0], "attention_mask": [1, 1, 1, 0, 0], "position_ids": [0, 1, 2, 1, 1]}
    assert one(tmp_path, padded).ids == [5, 6, 7], "positions of padding mean nothing"
    assert "'token_type_ids' are not all zero" in refusal(tmp_path, {**plain, "token_type_ids": [0, 0, 1]})


# ---- files ----------------------------------------------------------------------------------------------------------


def test_the_same_rows_give_the_same_tokens_from_every_kind_of_file(tmp_path: Path) -> None:
    datasets, pa = pytest.importorskip("datasets"), pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    schema = {"type": "object", "required": ["city"]}
    tool = {"type": "function", "function": {"name": "weather", "description": "now", "parameters": schema}}
    other = {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}}

    def call(**arguments: Any) -> dict[str, Any]:
        function = {"name": "weather", "arguments": arguments}
        return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}

    result = {"role": "tool", "content": "rain", "name": "weather"}
    rows = [
        {"messages": [USER, call(city="Paris"), result, ANSWER], "tools": [tool]},
        {"messages": [USER, call(days=2), result, {**ANSWER, "reasoning_content": "Hm."}], "tools": [other]},
        {"messages": [USER, ANSWER], "tools": None},
    ]
    table = pa.Table.from_pylist(rows)
    lines = write_rows(tmp_path / "a.jsonl", *rows)
    write_rows(tmp_path / "b.ndjson", *rows)
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(lines.read_bytes()))
    (tmp_path / "d.json").write_text(json.dumps(rows))
    pq.write_table(table, tmp_path / "e.parquet")
    with pa.OSFile(str(tmp_path / "f.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    with pa.OSFile(str(tmp_path / "g.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    datasets.Dataset(table).save_to_disk(tmp_path / "h")
    want = read_path(lines, byte_level())
    assert len(want) == 3 and "days" not in want[0].text and "null" not in want[1].text
    for name in ("b.ndjson", "c.jsonl.gz", "d.json", "e.parquet", "f.arrow", "g.arrow", "h"):
        assert read_path(tmp_path / name, byte_level()) == want, name


@pytest.mark.parametrize("name", ["a.jsonl", "b.json"])
def test_pipes_and_devices_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.jsonl").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "b.json")
    with pytest.raises(ValueError, match=r"cannot be read \(not a regular file\); give a regular file"):
        read_path(tmp_path / name, byte_level())


def test_a_table_of_text_is_read_and_a_broken_one_named(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('prompt,completion,id\n"hi",yo,1\n"a, b","two\nlines",2\n')
    found = read_path(path, byte_level())
    assert found[0] == one(tmp_path, {"prompt": "hi", "completion": "yo"}) and "two\nlines" in found[1].text
    path.write_text("text,id\nyo,1,2\n")
    with pytest.raises(ValueError, match=r"a\.csv cannot be read as CSV past row 0: it has more cells than columns"):
        read_path(path, byte_level())


def test_masks_of_long_answers_follow_the_text(tmp_path: Path) -> None:
    text = "naïve 😀 你好 " * 500
    found = one(tmp_path, {"messages": [USER, {"role": "assistant", "content": text}, USER, ANSWER]})
    assert found.targets == [f"{text}<|im_end|>\n", *LEARNT]
    assert np.count_nonzero(found.mask) < len(found.ids)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "'chosen' holds preferences, which only lightseq train --o"),
        ({"chosen": [USER, ANSWER], "rejected": [USER, ANSWER]}, "'chosen' holds preferences"),
        ({"image": "a.png", "caption": "b"}, "'image' holds no text; lightseq train reads text only"),
        ({"weight": 1, "body": "b"}, "has no column 'text', messages, or prompt and completion; it has: weight, body"),
        ({"label": 1, "sentence": "b"}, "has no column 'text', messages, or prompt and completion; it has: label"),
        ({"input_ids": [3, 4, 5], "attention_mask": [0, 1, 1]}, "has padding on the left; pad on the right"),
        ({"input_ids": [3, 4, 5], "attention_mask": [1, 0, 1]}, "has holes"),
        ({"input_ids": [3, 4, 5], "attention_mask": [1, 2, 0]}, "has values beside 0 and 1"),
        ({"input_ids": [3, 4, 5], "attention_mask": [1, 1]}, "has 2 values for 3 input_ids"),
    ],
)
def test_rows_of_an_unknown_format_and_masks_with_faults_are_refused(
    tmp_path: Path, row: dict[str, Any], reason: str
) -> None:
    assert reason in refusal(tmp_path, row)


def test_names_that_stand_twice_are_refused(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "a.csv").write_text("text,text\na,b\n")
    (tmp_path / "a.jsonl").write_text('{"messages": [{"role": "assistant", "content": "a", "content": "b"}]}\n')
    (tmp_path / "a.json").write_text('[{"text": "a", "text": "b"}]')
    pq.write_table(pa.table([pa.array(["a"]), pa.array(["b"])], ["text", "text"]), tmp_path / "a.parquet")
    for name, column in (("a.csv", "text"), ("a.jsonl", "content"), ("a.json", "text"), ("a.parquet", "text")):
        with pytest.raises(ValueError, match=rf"'{column}'.*(is given twice|; rename or remove one)"):
            open_path(tmp_path / name, byte_level())
