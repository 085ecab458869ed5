"""Answers of chats: which text is learnt, with the chat templates of published models and with odd ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from byte_level import CHATML, Document, byte_level, open_path, published, read_path, read_rows, write_rows

from lightseq.utils.limited import limited_map

pytestmark = pytest.mark.usefixtures("rendered_here")

USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
USER_SAYS = {"from": "human", "value": "hi"}  # as ShareGPT writes it
AGAIN, WELL = {"role": "user", "content": "and?"}, {"role": "assistant", "content": "well"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CALL = {"function": {"name": "weather", "arguments": {"city": "Paris", "days": 2}}, "type": "function"}
CALLED = [
    USER,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "rain"},
    {"role": "assistant", "content": "It rains."},
]


def one(folder: Path, template: str, row: dict[str, Any]) -> Document:
    (found,) = read_rows(folder, byte_level(template), row)
    return found


def refusal(folder: Path, template: str, row: dict[str, Any]) -> str:
    with pytest.raises(ValueError) as caught:
        read_rows(folder, byte_level(template), row)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("template", "learnt"),
    [
        ("llama3", [["yo<|eot_id|>", "well<|eot_id|>"]]),
        ("qwen2_5", [["yo<|im_end|>\n", "well<|im_end|>\n"]]),
        ("gemma3", [["yo<end_of_turn>\n", "well<end_of_turn>\n"]]),
        ("qwen3", [["<think>\n\n</think>\n\nyo<|im_end|>\n"], ["<think>\n\n</think>\n\nwell<|im_end|>\n"]]),
        ("qwen3_5_think", [["\n</think>\n\nyo<|im_end|>\n"], ["\n</think>\n\nwell<|im_end|>\n"]]),
        ("phi3", [["yo<|end|>\n<eos>"], ["well<|end|>\n<eos>"]]),
        ("gptoss", [["<|channel|>final<|message|>yo<|return|>"], ["<|channel|>final<|message|>well<|return|>"]]),
        ("deepseek_r1_distill", [["yo<｜end▁of▁sentence｜>", "well<｜end▁of▁sentence｜>"]]),
        ("qwen3_training", [["<think>\n\n</think>\n\nyo<|im_end|>", "<think>\n\n</think>\n\nwell<|im_end|>"]]),
        ("phi3_training", [["yo<|end|>\n", "well<|end|>\n<eos>"]]),
        ("phi3_5_training", [["yo<|end|>\n", "well<|end|>\n<eos>"]]),
        ("smolvlm", [[" yo<end_of_utterance>\n", " well<end_of_utterance>\n"]]),
    ],
)
def test_a_chat_of_two_turns_teaches_both_answers(tmp_path: Path, template: str, learnt: list[list[str]]) -> None:
    found = read_rows(tmp_path, byte_level(published(template)), {"messages": [USER, ANSWER, AGAIN, WELL]})
    assert [[run.rstrip() for run in one.targets] for one in found] == [[run.rstrip() for run in x] for x in learnt]


def test_an_answer_is_learnt_after_the_text_that_the_model_sees_when_it_generates(tmp_path: Path) -> None:
    tokenizer = byte_level(published("qwen3"))
    thoughts = [{**ANSWER, "reasoning_content": "A greeting."}, {**WELL, "reasoning_content": "Hm."}]
    messages = [USER, thoughts[0], AGAIN, thoughts[1]]
    first, second = read_rows(tmp_path, tokenizer, {"messages": messages})
    for found, turns in ((first, messages[:2]), (second, messages)):
        prompt = tokenizer.backend.apply_chat_template(turns[:-1], tokenize=False, add_generation_prompt=True)
        assert found.text == prompt + found.targets[0] and len(found.targets) == 1
    assert "A greeting." not in second.text and "Hm." in second.targets[0]


def test_notes_count_the_tokens_that_are_repeated_as_context(tmp_path: Path) -> None:
    tokenizer = byte_level(published("qwen3"))
    path = write_rows(tmp_path / "a.jsonl", {"messages": [USER, ANSWER, AGAIN, WELL]}, {"messages": [USER, ANSWER]})
    notes, (first, second, third) = open_path(path, tokenizer).notes, read_path(path, tokenizer)
    assert notes[0].startswith(f"{path}: 3 examples of 2 chat rows as tokens in ")
    assert (
        f"{path}: the chat template rewrites earlier turns, so each answer is an example of its own; {len(first.ids)} "
        f"tokens are repeated as context (1 row, the first {path} line 1)"
    ) in notes
    assert len(second.ids) > len(first.ids) and len(third.ids) == len(first.ids)


def test_marked_answers_leave_out_those_that_the_row_masks(tmp_path: Path) -> None:
    found = one(tmp_path, published("qwen3_training"), {"messages": [USER, {**ANSWER, "weight": 0}, AGAIN, WELL]})
    assert [run.rstrip().endswith("well<|im_end|>") for run in found.targets] == [True] and "yo" in found.text


def test_a_template_that_only_appends_makes_one_example_of_calls_and_answers(tmp_path: Path) -> None:
    for template in (CHATML, published("qwen2_5"), published("llama3_1"), published("qwen3_5_think")):
        rows = [CALLED, [{**turn, "tool_calls": [_as_text(CALL)]} if "tool_calls" in turn else turn for turn in CALLED]]
        found = [read_rows(tmp_path, byte_level(template), {"messages": turns, "tools": [TOOL]}) for turns in rows]
        assert found[0] == found[1], "arguments as an object or as JSON text"
        ((one,), _) = found
        assert len(one.targets) == 2 and "weather" in one.targets[0] and "Paris" in one.targets[0]
        assert "It rains." in one.targets[1] and "rain" not in one.targets[0]
        assert "weather" in one.text[: one.text.index(one.targets[0])], "functions are described in the prompt"


def _as_text(call: dict[str, Any]) -> dict[str, Any]:
    return {**call, "function": {**call["function"], "arguments": '{"city": "Paris", "days": 2}'}}


def test_arguments_are_written_as_json_where_the_template_prints_them_as_they_are(tmp_path: Path) -> None:
    template = CHATML.replace("c.function.arguments | tojson", "c.function.arguments")
    for nothing in ({"content": ""}, {"content": None}, {}):
        messages = [USER, {"role": "assistant", "tool_calls": [CALL], **nothing}, *CALLED[2:]]
        found = one(tmp_path, template, {"messages": messages})
        assert '<tool_call>weather {"city": "Paris", "days": 2}</tool_call>' in found.targets[0]


def test_an_answer_that_the_template_leaves_out_is_refused_with_both_texts(tmp_path: Path) -> None:
    said = refusal(tmp_path, published("lfm2"), {"messages": CALLED, "tools": [TOOL]})
    assert "does not write the answer 'weather', but '<|im_end|>\\n'; correct the row" in said
    thought = {"role": "assistant", "content": "<think>\nA greeting.\n</think>\n\nyo"}
    said = refusal(tmp_path, published("deepseek_r1_distill"), {"messages": [USER, thought]})
    assert "does not write the answer '<think>" in said
    said = refusal(tmp_path, CHATML.replace("m.content }}", "m.content | upper }}"), {"messages": [USER, ANSWER]})
    assert "does not write the answer 'yo', but 'YO<|im_end|>\\n'" in said


def test_what_the_template_does_not_read_is_refused_by_name(tmp_path: Path) -> None:
    llama3, chat = published("llama3"), [USER, ANSWER]
    for row, named in (
        ({"messages": chat, "tools": [TOOL]}, "'tools'"),
        ({"messages": chat, "documents": [{"title": "a", "text": "b"}]}, "'documents'"),
        ({"messages": chat, "chat_template_kwargs": {"enable_thinking": False}}, "'enable_thinking'"),
        ({"messages": chat, "chat_template_kwargs": {"tokenize": True}}, "'tokenize'"),
        ({"messages": [USER, {**ANSWER, "reasoning_content": "Hm."}]}, "'reasoning_content' of a turn"),
        ({"messages": [USER, {**ANSWER, "channel": "final"}]}, "'channel' of a turn"),
    ):
        assert f"does not read {named}, which would be lost" in refusal(tmp_path, llama3, row)
    unthinking = {"messages": chat, "chat_template_kwargs": {"enable_thinking": False}}
    found = one(tmp_path, published("qwen3"), unthinking)
    assert found.targets == ["yo<|im_end|>\n"], "the generation prompt holds the empty thought then"


PLAIN = "{% for m in messages %}{{ '\n' ~ m.role ~ ': ' ~ m.content }}{% endfor %}" + (
    "{% if add_generation_prompt %}{{ '\nassistant: ' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "without_note", "note"),
    [
        (PLAIN, PLAIN.replace("m.content", "m.content ~ eos_token"), "ends in text instead of a special token"),
        (CHATML.replace("in messages", "in messages if m.role != 'system'"), CHATML, "leaves out text of a turn"),
    ],
)
def test_notes_name_answers_without_an_end_and_turns_that_the_template_leaves_out(
    tmp_path: Path, template: str, without_note: str, note: str
) -> None:
    path = write_rows(tmp_path / "a.jsonl", {"messages": [{"role": "system", "content": "Be terse."}, USER, ANSWER]})
    assert any(note in x and "(1 row" in x for x in open_path(path, byte_level(template)).notes)
    assert not any(note in x for x in open_path(path, byte_level(without_note)).notes)


def test_a_template_that_runs_without_end_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightseq.utils.limited.MAX_SECONDS", 1.0)
    monkeypatch.setattr("lightseq.data.token_cache.limited_map", limited_map)
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    assert "takes more than 1 s" in refusal(tmp_path, endless + CHATML, {"messages": [USER, ANSWER]})


@pytest.mark.parametrize("generates", [True, False])
@pytest.mark.parametrize(
    ("first", "learnt"),
    [
        ({"role": "assistant", "content": "You"}, "You<|im_end|>\n"),  # which the default prompt contains
        ({"role": "assistant", "content": "", "tool_calls": [CALL]}, "<tool_call>"),
        ({"role": "assistant", "content": "b", "reasoning_content": "so"}, "<think>so</think>b<|im_end|>\n"),
    ],
)
def test_a_chat_that_the_assistant_begins_teaches_no_prompt(
    tmp_path: Path, first: dict[str, Any], learnt: str, generates: bool
) -> None:
    template = "<|im_start|>system\nYou are a default prompt.<|im_end|>\n" + CHATML
    if not generates:
        template = template.partition("{% if add_generation_prompt %}")[0]
    for more in ([], [AGAIN, WELL]) if generates else ([],):
        found = one(tmp_path, template, {"messages": [first, *more]})
        assert found.targets[0].startswith(learnt) and len(found.targets) == 1 + bool(more)


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        ({"from": "gpt", "value": "b", "role": "user"}, "has both 'from' and 'role'; keep one"),
        ({"role": "assistant", "content": "b", "value": "c"}, "has both 'content' and 'value'; keep one"),
        ({**ANSWER, "reasoning_content": "c", "thinking": "d"}, "has both 'reasoning_content' and 'thinking'"),
        ({"role": "assistant", "tool_calls": [{**CALL, "result": "d"}]}, "does not read 'result' of a call"),
        ({"from": "function_call", "value": '{"name": "f", "arguments": {}, "thought": "d"}'}, "'thought' of a call"),
    ],
)  # fmt: skip
def test_no_member_of_a_turn_or_a_call_is_lost(tmp_path: Path, turn: dict[str, Any], reason: str) -> None:
    assert reason in refusal(tmp_path, CHATML, {"messages": [USER, turn, AGAIN, ANSWER]})
    repeated = {**ANSWER, "from": None, "value": "", "reasoning": "so", "thinking": "so"}  # as Arrow fills turns
    assert read_rows(tmp_path, byte_level(), {"messages": [USER, repeated]})


def test_a_null_in_json_text_stays_and_one_that_arrow_fills_in_goes(tmp_path: Path) -> None:
    def calls(arguments: Any) -> str:
        turn = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
        return one(tmp_path, CHATML, {"messages": [USER, turn]}).text

    assert '{"x": null}' in calls('{"x": null}') and '{"y": 1}' in calls({"x": None, "y": 1})
    call = '{"name": "f", "arguments": {"x": null}}'
    row = {"conversations": [USER_SAYS, {"from": "function_call", "value": call}]}
    assert '{"x": null}' in one(tmp_path, CHATML, row).text
    row = {"messages": [USER, ANSWER], "tools": '[{"name": "f", "default": null}]'}
    assert '"default": null' in one(tmp_path, CHATML, row).text


def test_arrow_maps_are_objects_and_its_times_are_refused(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    def write(name: str, kind: Any, value: Any) -> Path:
        call = pa.struct([("function", pa.struct([("name", pa.string()), ("arguments", kind)]))])
        turn = pa.struct([("role", pa.string()), ("content", pa.string()), ("tool_calls", pa.list_(call))])
        asks = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": value}}]}
        table = pa.table({"messages": pa.array([[{**USER, "tool_calls": None}, asks]], pa.list_(turn))})
        pq.write_table(table, tmp_path / name)
        return tmp_path / name

    (found,) = read_path(write("map.parquet", pa.map_(pa.string(), pa.string()), [("city", "Paris")]), byte_level())
    assert '{"city": "Paris"}' in found.text
    times = write("time.parquet", pa.struct([("when", pa.timestamp("s"))]), {"when": 0})
    with pytest.raises(ValueError, match="a datetime, which JSON does not have; write it as text"):
        read_path(times, byte_level())
