"""Special tokens at the ends of texts, prompts, answers and chats: each is there once, and a model learns to stop."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byte_level import CHATML, byte_level, published, read_path, read_rows
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from data_gen.__main__ import main as data_gen
from lightseq.data.examples import open_windows
from lightseq.data.load_tokenizer import load_tokenizer
from lightseq.data.tokenizer import PretrainedTokenizer

pytestmark = pytest.mark.usefixtures("rendered_here")
BOS, EOS = 2, 1
BOS_IN_TEMPLATE = "{{ bos_token }}" + CHATML
GLM_ENDS = ("<|endoftext|>", "<|user|>", "<|observation|>")
USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
AGAIN, WELL = {"role": "user", "content": "and?"}, {"role": "assistant", "content": "well"}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}


def tokenizer_of(template: str | None, single: str = "<bos> $A") -> PretrainedTokenizer:
    """Returns the tokenizer of bytes, which adds special tokens as `single` says."""
    made = byte_level(template)
    made.backend.backend_tokenizer.post_processor = TemplateProcessing(
        single=single, pair="$A $B", special_tokens=[("<bos>", BOS), ("<eos>", EOS)]
    )
    return made


@pytest.mark.parametrize("single", ["<bos> $A", "<bos> $A <eos>", "$A"])
@pytest.mark.parametrize(
    "row",
    [
        {"text": "hi yo"},
        {"prompt": "hi ", "completion": "yo"},
        {"instruction": "hi ", "output": "yo"},
        {"instruction": "hi ", "input": "you", "output": "yo"},
    ],
    ids=lambda row: "+".join(row),
)
def test_specials_that_a_row_has_already_are_not_added(tmp_path: Path, single: str, row: dict[str, str]) -> None:
    tokenizer = tokenizer_of(None, single)
    first, last = next(iter(row)), [*row][-1]
    rows = [row, *({**row, last: row[last] + end} for end in ("<eos>", "<eos>\n"))]
    rows += [{**each, first: "<bos>" + each[first]} for each in rows] if "<bos>" in single else []
    plain, *others = read_rows(tmp_path, tokenizer, *rows)
    assert plain.ids.count(BOS) == int("<bos>" in single) and plain.ids.count(EOS) == 1 == plain.targets[-1].count(
        "<eos>"
    )
    assert all(other.ids == plain.ids and other.targets[-1] == plain.targets[-1] for other in others)


def test_specials_are_not_doubled_in_texts_of_files(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(None)
    (tmp_path / "a.txt").write_text("<bos>hi yo<eos>")
    (found,) = read_path(tmp_path / "a.txt", tokenizer)
    assert found.text == "<bos>hi yo<eos>"
    tokenizer.backend.save_pretrained(tmp_path / "tokenizer")
    made = f"text {tmp_path}/a.txt --tokenizer {tmp_path}/tokenizer --output {tmp_path}/tokens"
    assert data_gen(made.split()) == 0
    assert np.array_equal(open_windows(tmp_path / "tokens", 64, 300).source.document(0), found.ids)


def test_token_directories_made_before_are_known_by_the_same_hash() -> None:
    """The hash covers a text that begins with BOS, to which tokenizers add another."""
    assert tokenizer_of(None).vocabulary_fingerprint == "e9f46493336a43da"


def test_specials_that_a_template_writes_are_not_doubled(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(BOS_IN_TEMPLATE)
    want = read_rows(tmp_path, tokenizer, {"messages": [USER, ANSWER]})
    assert want[0].text.count("<bos>") == 1 == want[0].text.count("<|im_end|>") - 1
    bos, ended = {**USER, "content": "<bos>hi"}, {**ANSWER, "content": "yo<|im_end|>\n"}
    for row in (
        {"messages": [bos, ended]},
        {"prompt": "<bos>hi", "completion": "yo<|im_end|>"},
        {"instruction": "hi", "input": "", "output": "yo<|im_end|>"},
        {"prompt": [bos], "completion": [ended]},
    ):
        assert read_rows(tmp_path, tokenizer, row) == want, row
    rendered = {"text": want[0].text.rstrip() + "<eos>"}
    assert read_rows(tmp_path, tokenizer, rendered)[0].text == rendered["text"]


def glm(template: str) -> PretrainedTokenizer:
    """Returns the tokenizer with the special tokens of GLM 4.5."""
    tokenizer = byte_level(published(template))
    markers = ["[gMASK]", "<sop>", "<|system|>", "<|assistant|>", *GLM_ENDS]
    tokenizer.backend.add_special_tokens({"additional_special_tokens": markers})
    ends = tuple(tokenizer.backend.convert_tokens_to_ids(list(GLM_ENDS)))
    return PretrainedTokenizer("glm", tokenizer.vocab_size, tokenizer.backend, end_ids=ends)


@pytest.mark.parametrize("template", ["glm4moe", "glm4moe_training"])
def test_the_next_role_s_marker_ends_an_answer_if_the_model_stops_there(tmp_path: Path, template: str) -> None:
    tokenizer = glm(template)
    call = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    messages = [USER, ANSWER, AGAIN, call, {"role": "tool", "content": "rain"}, WELL]
    (found,) = read_rows(tmp_path, tokenizer, {"messages": messages})
    assert [run[-20:].split("<|")[-1] for run in found.targets] == ["user|>", "observation|>", "user|>"]
    assert found.text.endswith("well<|user|>") and found.text.count("<|user|>") == 3
    (first,) = read_rows(tmp_path, tokenizer, {"messages": messages[:4]})
    assert first.text.endswith("<|observation|>"), "a last call is followed by its result"
    assert replace(tokenizer, end_ids=()).fingerprint != tokenizer.fingerprint
    masked = [USER, {**ANSWER, "weight": 0}, AGAIN, WELL]
    (found,) = read_rows(tmp_path, tokenizer, {"messages": masked})
    assert len(found.targets) == 1, "a masked answer's marker is no target"


ENDS = {
    "cohere2": ["<|END_RESPONSE|>", "<|END_OF_TURN_TOKEN|>"],
    "cohere2_training": ["<|END_RESPONSE|>", "<|END_OF_TURN_TOKEN|>"],
    "smolvlm": ["<end_of_utterance>"],
    "idefics3": ["<end_of_utterance>"],
    "llava_next": ["</s>"],
    "gptoss": ["<|end|>", "<|return|>"],
    "phi3": ["<|end|>", "<|endoftext|>"],
    "glm4moe": ["<|user|>"],
    "glm4moe_training": ["<|user|>"],
}


@pytest.mark.parametrize("template", ENDS)
def test_an_answer_with_an_end_of_its_own_is_learnt_as_one_without(tmp_path: Path, template: str) -> None:
    """The end may be any special token that the template writes there, or all of them."""
    if template.startswith("glm"):
        tokenizer = glm(template)
    else:
        tokenizer = byte_level(published(template))
        tokenizer.backend.add_special_tokens({"additional_special_tokens": ENDS[template]})
        tokenizer.backend.eos_token = ENDS[template][-1]

    def rows(end: str) -> list[dict[str, Any]]:
        yo, well = ({**turn, "content": turn["content"] + end} for turn in (ANSWER, WELL))
        return [
            {"messages": [USER, yo]},
            {"messages": [USER, yo, AGAIN, well]},
            {"messages": [yo, AGAIN, well]},
            {"prompt": "hi", "completion": yo["content"]},
            {"prompt": [USER], "completion": [yo], "system": "Be terse."},
        ]

    for number in (0, 1, 3, 4) if template.startswith("cohere") else range(5):  # Cohere's roles alternate
        plain = read_rows(tmp_path, tokenizer, rows("")[number])
        for end in (*ENDS[template], "".join(ENDS[template]), ENDS[template][-1] + "\n"):
            assert read_rows(tmp_path, tokenizer, rows(end)[number]) == plain, (number, end)


def test_reasoning_that_the_template_drops_leaves_the_markers_in_place(tmp_path: Path) -> None:
    turns = [USER, {**ANSWER, "reasoning_content": "Hm."}, AGAIN, {**WELL, "reasoning_content": "So."}]
    first, second = read_rows(tmp_path, glm("glm4moe"), {"messages": turns})
    assert first.targets[0].endswith("yo<|user|>") and second.targets[0].endswith("well<|user|>")


def test_the_ends_of_a_tokenizer_are_those_of_the_model_s_settings(tmp_path: Path) -> None:
    backend: PreTrainedTokenizerFast = glm("glm4moe").backend
    backend.save_pretrained(tmp_path)
    for name, settings, ends in (
        ("config.json", {"eos_token_id": 5}, (5,)),
        ("config.json", {"text_config": {"eos_token_id": [5, 6]}}, (5, 6)),
        ("generation_config.json", {"eos_token_id": [7, 8]}, (7, 8)),
        ("generation_config.json", {"eos_token_id": None}, (5, 6)),
    ):
        (tmp_path / name).write_text(json.dumps(settings))
        loaded: Any = load_tokenizer(str(tmp_path))
        assert loaded.end_ids == ends
    for text, reason in (
        ("{", "cannot be read"),
        ("[]", "is not a JSON object"),
        ('{"eos_token_id": "a"}', "'a', not"),
    ):
        (tmp_path / "generation_config.json").write_text(text)
        with pytest.raises(ValueError, match=reason):
            load_tokenizer(str(tmp_path))
