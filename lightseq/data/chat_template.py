"""Chat templates: the turns, functions and variables that a tokenizer's template reads, and the text that it writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

Turn = dict[str, Any]
Span = tuple[int, int]  # first character, and the end


@dataclass(frozen=True)
class TemplateInputs:
    """Inputs of a chat template, without the turns."""

    tools: list[dict[str, Any]] | None = None  # JSON schemas
    documents: list[dict[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)  # such as enable_thinking


@dataclass(frozen=True)
class TemplateNames:
    """Names in a template's code. A key or variable that is not among them cannot reach the rendered text."""

    variables: frozenset[str]
    keys: frozenset[str]  # keys of turns and other objects that the template reads
    texts: frozenset[str]  # constants, such as roles
    marks_answers: bool  # has {% generation %} blocks


@dataclass(frozen=True)
class ChatTemplate:
    """Chat template of a transformers tokenizer. `name` is what errors call it."""

    backend: Any
    name: str
    special_texts: tuple[str, ...] = ()  # special tokens
    end_texts: tuple[str, ...] = ()  # texts after which a model stops

    def names(self, inputs: TemplateInputs) -> TemplateNames:
        """Returns the names that the template reads. Chats with tools may have their own template."""
        return find_names(self.backend.get_chat_template(None, inputs.tools))

    def render(self, turns: list[Turn], inputs: TemplateInputs, add_generation_prompt: bool = False) -> str:
        """Returns the turns as text. Raises whatever the template raises."""
        return str(
            self.backend.apply_chat_template(
                turns,
                tools=inputs.tools,
                documents=inputs.documents,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **inputs.variables,
            )
        )

    def render_marked(self, turns: list[Turn], inputs: TemplateInputs) -> tuple[str, list[Span]]:
        """Returns the turns as text, and the spans of the template's {% generation %} blocks."""
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, spans = render_jinja_template(
            [turns],
            tools=inputs.tools,
            documents=inputs.documents,
            chat_template=self.backend.get_chat_template(None, inputs.tools),
            return_assistant_tokens_mask=True,
            **{**self.backend.special_tokens_map, **inputs.variables},
        )
        return str(texts[0]), [(start, end) for start, end in spans[0] if start < end]


@lru_cache(maxsize=8)
def find_names(template: str) -> TemplateNames:
    """Returns the names in a Jinja template. Raises jinja2's TemplateSyntaxError if it cannot be parsed."""
    from jinja2 import Environment, nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class Generation(Extension):
        """Parses {% generation %} blocks, which transformers adds to Jinja."""

        tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

        def parse(self, parser: Parser) -> list[nodes.Node]:
            marked.append(next(parser.stream).lineno)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    marked: list[int] = []
    tree = Environment(extensions=[Generation, "jinja2.ext.loopcontrols"]).parse(template)
    constants = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    attributes = {node.attr for node in tree.find_all(nodes.Getattr)}
    # Keys also stand as text: turn['name'], turn.get('name'), 'name' in turn.
    return TemplateNames(
        variables=frozenset(node.name for node in tree.find_all(nodes.Name)),
        keys=frozenset(attributes | constants),
        texts=frozenset(constants),
        marks_answers=bool(marked),
    )
