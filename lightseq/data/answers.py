"""Places of a chat's answers in the text that the chat template writes.

Templates with {% generation %} blocks mark the answers themselves. With others, an answer is what the template writes
after the generation prompt. A template that only appends makes one text of the whole chat. One that rewrites earlier
turns, for example to drop their reasoning, makes one text per answer, in which the turns before it read as they do
when the model generates.

Some templates end an answer with the marker of the next turn. If the model stops at this marker, it is a target.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, Final

from lightseq.data.chat_template import ChatTemplate, Span, TemplateInputs, Turn
from lightseq.data.chats import Chat, function_of, is_answer, with_parts, with_text_arguments, without_empty_contents
from lightseq.data.columns import REASONING_KEYS, squeeze
from lightseq.data.sources import check_encodable
from lightseq.data.tokenizer import Tokenizer
from lightseq.utils.formatting import first_line

REWRITES: Final = "the chat template rewrites earlier turns, so each answer is an example of its own"
OTHER_PROMPT: Final = (
    "an answer does not begin as the chat template's generation prompt ends; its target begins where they differ"
)
LOST_TURN: Final = "the chat template leaves out text of a turn that is no answer"
MAX_SHOWN: Final = 60  # characters of a text in an error
PROBE: Final = "lightseq"  # content whose surroundings show what a template writes
MAX_SHARED: Final = 64  # most characters of a generation prompt that may begin the answer


@dataclass
class RenderedChat:
    """Text of a chat or of its turns up to an answer, and the spans of the answers to learn."""

    text: str
    spans: list[Span]
    remarks: set[str] = field(default_factory=set)  # what is unusual, for notes


def render_answers(chat: Chat, template: ChatTemplate) -> list[RenderedChat]:
    """Returns the texts to train on; none if no answer is to be learnt. Turns after the last answer are left out.

    Raises ValueError if the template fails, or does not write an answer as it stands in the row.
    """
    if not any(chat.learnt):
        return []
    chat = _without_repeated_specials(chat, template)
    last = max(index for index, learns in enumerate(chat.learnt) if learns)
    problem = ""
    for turns in _variants(list(chat.turns[: last + 1])):
        try:
            found = _Renderer(chat, template, turns).render()
        except _NotWritten as error:
            problem = problem or str(error)
        else:
            _remark_lost_turns(found, chat.turns[: last + 1])
            return found
    raise ValueError(problem)


def render_turns(
    chats: Sequence[tuple[list[Turn], bool]], inputs: TemplateInputs, template: ChatTemplate, where: str
) -> list[str]:
    """Returns chats as text, each with or without the generation prompt. Raises ValueError if the template fails."""
    renderer = _Renderer(Chat((), (), inputs, where), template, [])
    try:
        return [renderer.write(turns, adds_prompt) for turns, adds_prompt in chats]
    except _NotWritten:
        return [renderer.write(with_parts(turns), adds_prompt) for turns, adds_prompt in chats]


def template_of(tokenizer: Tokenizer, where: str) -> ChatTemplate:
    """Returns the tokenizer's chat template. Raises ValueError if it has none."""
    if tokenizer.chat_template is None:
        raise ValueError(
            f"{where} is a chat, but tokenizer {tokenizer.name} has no chat template; give --tokenizer one that has, "
            "or give --chat_template"
        )
    return tokenizer.chat_template


def _without_repeated_specials(chat: Chat, template: ChatTemplate) -> Chat:
    """Removes special tokens at the end of an answer or the beginning of the chat if the template writes them there."""
    turns, specials = [*chat.turns], template.special_texts
    answers = [turn for turn in turns if is_answer(turn) and turn["content"].rstrip().endswith(specials)]
    opening = turns[: 2 if turns[0]["role"] == "system" else 1]
    if not answers and not any(turn["content"].startswith(specials) for turn in opening):
        return chat
    begins, ends = _written_specials(_Renderer(chat, template, turns))
    for number, turn in enumerate(turns):
        content = turn["content"]
        if number < len(opening):
            for begin in begins:
                content = content.removeprefix(begin)
        while turn in answers and (end := next((end for end in ends if content.rstrip().endswith(end)), "")):
            content = content.rstrip().removesuffix(end)
        turns[number] = {**turn, "content": content}
    return replace(chat, turns=tuple(turns))


def _written_specials(renderer: _Renderer) -> tuple[list[str], set[str]]:
    """Returns the special tokens that begin a chat, in order, and the special tokens that end answers.

    A template may end the last answer with other ones. Contents are text, or parts if it does not write text.
    """
    asked = [{"role": "user", "content": PROBE}, {"role": "assistant", "content": PROBE}]
    specials, stops = renderer.template.special_texts, renderer.template.end_texts
    for form in (list, with_parts):
        with suppress(_NotWritten):
            written = renderer.write(form(asked), False)
            if PROBE not in written:
                continue
            before, after = written.partition(PROBE)[0], written.rpartition(PROBE)[2]
            begins, rest = list[str](), before
            while begin := max(filter(rest.startswith, specials), key=len, default=""):
                begins.append(begin)
                rest = rest.removeprefix(begin)
            to_user = shared = ""
            with suppress(_NotWritten):
                pieces = renderer.write(form([*asked, *asked]), False).split(PROBE)
                to_answer, to_user = pieces[1:3] if len(pieces) == 5 else ("", "")
                shared = to_user[: _shared_length(to_user, to_answer)]  # every turn ends so
            ended = {text for text in specials if text in after or text in shared}
            return begins, ended | {text for text in stops if text in to_user}
    return [], set()


class _NotWritten(ValueError):
    """Error for a template that fails or leaves out an answer. Another form of the turns may work."""


def _variants(turns: list[Turn]) -> Iterator[list[Turn]]:
    """Yields the forms of turns that templates expect: contents as text or parts, arguments as objects or text."""
    yield turns
    yield with_parts(turns)
    if any("tool_calls" in turn for turn in turns):
        yield without_empty_contents(turns)
        yield with_text_arguments(turns)
        yield with_text_arguments(without_empty_contents(turns))


@dataclass(frozen=True)
class _Renderer:
    chat: Chat
    template: ChatTemplate
    turns: list[Turn]

    def render(self) -> list[RenderedChat]:
        if self.template.names(self.chat.inputs).marks_answers and (marked := self._render_marked()):
            return [marked]
        found: list[RenderedChat] = []
        for number in [number for number, learns in enumerate(self.chat.learnt) if learns]:
            text, begin, remarks = self._render_up_to(number)
            self._check_answer(number, text, begin, len(text))
            text += self._marker_after(number, text)
            if found and text.startswith(found[-1].text):
                found[-1].spans.append((begin, len(text)))
                found[-1].text = text
                found[-1].remarks |= remarks
            else:
                found.append(RenderedChat(text, [(begin, len(text))], remarks))
        if len(found) > 1:
            for one in found:
                one.remarks.add(REWRITES)
        return found

    def _render_marked(self) -> RenderedChat | None:
        """Returns the chat with the answers that the template marks; None unless it marks every answer.

        A template may put text after an answer, such as the end of the chat, in another span.
        """
        text, spans = self._run(lambda: self.template.render_marked(self.turns, self.chat.inputs))
        answers = [number for number, turn in enumerate(self.chat.turns[: len(self.turns)]) if is_answer(turn)]
        if len(spans) > len(answers):
            spans = self._join_spans(answers, text, spans)
        if len(answers) != len(spans):
            return None
        try:
            for number, (start, end) in zip(answers, spans, strict=True):
                self._check_answer(number, text, start, end)
        except _NotWritten:
            return None
        learnt = []
        for number, (start, end) in zip(answers, spans, strict=True):
            if self.chat.learnt[number]:
                marker = self._marker_after(number, text[:end])
                if not text[end:].strip():  # the last turn
                    text = text[:end] + marker
                learnt.append((start, end + len(marker) * text[end:].startswith(marker)))
        return RenderedChat(text, learnt)

    def _join_spans(self, answers: list[int], text: str, spans: list[Span]) -> list[Span]:
        """Joins a span to the span directly before it, unless it holds another answer."""
        joined: list[Span] = []
        for start, end in spans:
            following = len(joined) < len(answers) and self._holds(answers[len(joined)], text, start, end)
            if joined and not following and not text[joined[-1][1] : start].strip():
                joined[-1] = (joined[-1][0], end)
            else:
                joined.append((start, end))
        return joined

    def _holds(self, number: int, text: str, start: int, end: int) -> bool:
        with suppress(_NotWritten):
            self._check_answer(number, text, start, end)
            return True
        return False

    def _marker_after(self, number: int, text: str) -> str:
        """Returns the next turn's marker, up to which `text` reaches, if the model stops at it.

        The last answer gets the marker of the turn that would follow. Returns nothing for an answer that ends itself.
        """
        if not self.template.end_texts or text.rstrip().endswith(self.template.special_texts):
            return ""
        later = self.chat.turns[number + 1 :]
        role = later[0]["role"] if later else "tool" if self.turns[number].get("tool_calls") else "user"
        answered = [{"role": "user", "content": PROBE}, {"role": "assistant", "content": PROBE}]
        form = with_parts if isinstance(self.turns[number].get("content"), list) else list
        with suppress(_NotWritten):
            before = self.write(form(answered), False)
            after = self.write(form([*answered, {"role": role, "content": PROBE}]), False)
            rest = after.removeprefix(before) if after.startswith(before) else ""
            end = next((end for end in self.template.end_texts if rest.lstrip().startswith(end)), "")
            return rest[: rest.index(end) + len(end)] if end else ""
        return ""

    def _render_up_to(self, number: int) -> tuple[str, int, set[str]]:
        """Returns the text of the turns up to an answer, where the answer begins in it, and remarks."""
        text = self.write(self.turns[: number + 1], False)
        if number == 0:
            return text, self._begin_of_first(text), set()
        prompt = self.write(self.turns[:number], True)
        if text.startswith(prompt):
            return text, len(prompt), set()
        before, shared = self.write(self.turns[:number], False), _shared_length(text, prompt)
        if not prompt.startswith(before) or shared < len(before):
            raise _NotWritten(
                f"{self.chat.where}: {self.template.name} writes the turns before an answer in another way than with "
                "it, so the answer cannot be located; give another --chat_template"
            )
        return text, shared, {OTHER_PROMPT}

    def _begin_of_first(self, text: str) -> int:
        """Returns where the answer begins if it is the chat's first turn; templates cannot render an empty chat.

        That is behind the generation prompt that the template writes after a user's turn, if the text has it, else
        where the text differs from one with another answer.
        """
        question, answers = {"role": "user", "content": "?"}, [{"role": "assistant", "content": x} for x in "AB"]
        form = with_parts if isinstance(self.turns[0].get("content"), list) else list
        asked, *others = (form([turn]) for turn in (question, *answers))
        with suppress(_NotWritten):
            prompt = self.write(asked, True).removeprefix(self.write(asked, False))
            if prompt.strip() and prompt in text:
                return text.index(prompt) + len(prompt)
        first, second = (self.write(turns, False) for turns in others)
        return _shared_length(first, second, text)

    def _check_answer(self, number: int, text: str, begin: int, end: int) -> None:
        """Raises _NotWritten if a part of an answer is not in text[begin:end], whitespace aside.

        It may begin before, because a generation prompt can end with the first words of an answer, such as <think>.
        """
        turn, before, written = self.chat.turns[number], text[max(0, begin - MAX_SHARED) : begin], text[begin:end]
        squeezed, first = squeeze(before + written), len(squeeze(before))
        if any(squeeze(form) in squeezed[first:] for form in _python_forms(turn)):
            raise _NotWritten(f"{self.chat.where}: {self.template.name} writes arguments as Python does, not as JSON")
        for expected in _parts_of(turn):
            if not _is_in(expected, squeezed, first):
                raise _NotWritten(
                    f"{self.chat.where}: {self.template.name} does not write the answer {_shorten(expected)}, but "
                    f"{_shorten(written)}; correct the row, or give another --chat_template"
                )

    def write(self, turns: list[Turn], add_generation_prompt: bool) -> str:
        return self._run(lambda: self.template.render(turns, self.chat.inputs, add_generation_prompt))

    def _run(self, render: Callable[[], Any]) -> Any:
        try:
            written = render()
        except MemoryError:
            raise
        except Exception as error:  # a template may raise anything
            raise _NotWritten(f"{self.chat.where}: {self.template.name} fails: {first_line(error)}") from error
        text = written if isinstance(written, str) else written[0]
        check_encodable(text, f"{self.chat.where}, rendered by {self.template.name}")
        return written


def _shared_length(*texts: str) -> int:
    """Returns the number of characters at the beginning that all texts share."""
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*texts, strict=False)))


def _parts_of(turn: Turn) -> list[str]:
    """Returns the texts of an answer that must be in its rendered text."""
    reasoning = next((turn[key] for key in REASONING_KEYS if turn.get(key)), None)
    parts = [turn.get("content"), reasoning]
    for call in turn.get("tool_calls", ()):
        holder = function_of(call)
        parts += [holder.get("name"), *_leaves(holder.get("arguments"))]
    return [part for part in parts if isinstance(part, str) and part.strip()]


def _python_forms(turn: Turn) -> list[str]:
    """Returns the arguments of calls as Python prints them, where JSON differs."""
    values = [function_of(call).get("arguments") for call in turn.get("tool_calls", ())]
    return [str(value) for value in values if isinstance(value, dict) and value]


def _leaves(value: Any) -> list[str]:
    """Returns the keys and texts in the arguments of a call."""
    if isinstance(value, dict):
        return [text for key, item in value.items() for text in (key, *_leaves(item))]
    if isinstance(value, list):
        return [text for item in value for text in _leaves(item)]
    return [value] if isinstance(value, str) else []


def _is_in(expected: str, squeezed: str, first: int = 0) -> bool:
    """Returns whether a text, or its form in a JSON string, is in a text without whitespace, and ends after `first`."""
    forms = (expected, *(json.dumps(expected, ensure_ascii=ascii)[1:-1] for ascii in (False, True)))
    return any(squeezed.rfind(form) + len(form) > first for form in map(squeeze, forms) if form in squeezed)


def _remark_lost_turns(found: list[RenderedChat], turns: Sequence[Turn]) -> None:
    text = squeeze(found[-1].text)
    others = [turn["content"] for turn in turns if turn["role"] != "assistant" and turn.get("content")]
    if not all(_is_in(content, text) for content in others):
        found[-1].remarks.add(LOST_TURN)


def _shorten(text: str) -> str:
    return repr(text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…")
