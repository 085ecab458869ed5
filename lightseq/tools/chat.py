"""Answers turns of a chat as they are typed, with a trained model in one process.

lightseq chat outputs/chat/checkpoint-1000 --system "Answer briefly."
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

from lightseq.config.parser import Parser, run_command
from lightseq.models.presets import ModelFamily
from lightseq.tools.writer import (
    Turn,
    Writer,
    add_sampling_flags,
    encode_turns,
    load_tokenizer_of,
    load_writer,
    sampling_of,
    say,
)  # fmt: skip

EXITS: Final = ("/exit", "/quit")
USAGE: Final = "type a turn and Enter; /new starts over, /exit or Ctrl-D ends, Ctrl-C stops an answer"
ROLE: Final = "> "


def parser() -> Parser:
    about = "Answers turns of a chat as they are typed, in one process. Without a terminal, each line is a turn."
    out = Parser(prog="lightseq chat", description=about)
    out.add_argument("checkpoint", help="directory of a checkpoint, a model or an adapter, or a hub id")
    out.add_argument("--system", metavar="TEXT", help="system prompt")
    add_sampling_flags(out, 1024, "an answer")
    return out


def main(_family: ModelFamily, words: Sequence[str]) -> int:
    return run_command(lambda: _chat(parser().parse_args(words)))


def _chat(args: argparse.Namespace) -> None:
    from lightseq.utils import quiet_transformers  # noqa: F401  first: imports take seconds

    sampling = sampling_of(args)
    directory, tokenizer = load_tokenizer_of(args.checkpoint)
    if tokenizer.chat_template is None:
        raise ValueError(
            f"the tokenizer of {args.checkpoint} has no chat template; train with --chat_template, or use "
            "lightseq generate"
        )
    opening = [] if args.system is None else [{"role": "system", "content": args.system}]
    encode_turns(tokenizer, [*opening, {"role": "user", "content": "hello"}], args.checkpoint)  # fails before loading
    writer = load_writer(args.checkpoint, directory, tokenizer, sampling)
    import torch

    torch.manual_seed(args.seed)
    on_terminal = sys.stdin.isatty()
    if on_terminal:
        say(USAGE)
    turns = list(opening)
    for text in typed_turns(on_terminal):
        if text in EXITS:
            break
        if text == "/new":
            turns = list(opening)
            continue
        turns.append({"role": "user", "content": text})
        turns.append({"role": "assistant", "content": answer(writer, turns)})


def typed_turns(on_terminal: bool) -> Iterator[str]:
    """Yields lines of the input that are not blank, until it ends. On a terminal, lines have a history."""
    if on_terminal:
        import readline  # noqa: F401  gives `input` its history
    while True:
        try:
            text = input(ROLE if on_terminal else "").strip()
        except (EOFError, KeyboardInterrupt):
            if on_terminal:
                print()
            return
        if text:
            yield text


def answer(writer: Writer, turns: Sequence[Turn]) -> str:
    """Prints the answer to a chat while it is written. Returns it, or the printed part after Ctrl-C."""
    ids = encode_turns(writer.tokenizer, turns, writer.name)
    note_length(writer, len(ids))
    streamer = printing_streamer(writer.tokenizer.as_transformers())
    try:
        added = writer.write(ids, streamer)
    except KeyboardInterrupt:
        print(flush=True)
        return "".join(streamer.printed)
    return str(writer.tokenizer.decode(added))


def note_length(writer: Writer, prompt: int) -> None:
    positions = getattr(writer.model.config.get_text_config(), "max_position_embeddings", None)
    tokens = prompt + writer.sampling["max_new_tokens"]
    if positions is not None and tokens > positions:
        say(f"the chat and its answer may take {tokens:,} tokens, and the model covers {positions:,}; /new starts over")


def printing_streamer(tokenizer: Any) -> Any:
    """Returns transformers' streamer to the terminal, which also holds what it has printed."""
    from transformers import TextStreamer  # takes seconds to import

    class Printer(TextStreamer):
        def __init__(self) -> None:
            super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
            self.printed: list[str] = []

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            self.printed.append(text)
            super().on_finalized_text(text, stream_end)

    return Printer()
