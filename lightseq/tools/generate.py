"""Continues prompts with a trained model, by transformers' own generation in one process.

A chat model gets each prompt as a user's turn of its chat template, and answers it.

lightseq generate outputs/books/checkpoint-1000 --prompt "It was a dark and stormy night"
"""

import argparse
from collections.abc import Sequence
from typing import Any

from lightseq.config.parser import Parser, run_command
from lightseq.models.presets import ModelFamily
from lightseq.tools.writer import (
    Writer,
    add_sampling_flags,
    encode_turns,
    load_tokenizer_of,
    load_writer,
    sampling_of,
    say,
)  # fmt: skip
from lightseq.utils.formatting import first_line, plural


def parser() -> Parser:
    out = Parser(prog="lightseq generate", description="Continues prompts with a trained model, in one process.")
    out.add_argument("checkpoint", help="directory of a checkpoint, a model or an adapter, or a hub id")
    out.add_argument("--prompt", action="append", required=True, help="text to continue; may be given several times")
    form = out.add_mutually_exclusive_group()
    raw = "continue the prompt as it is written; otherwise it is a user's turn if the tokenizer has a chat template"
    form.add_argument("--raw", action="store_true", help=raw)
    chat = "answer the prompt as a user's turn; refuse a tokenizer without a chat template"
    form.add_argument("--chat", action="store_true", help=chat)
    out.add_argument("--system", metavar="TEXT", help="system prompt of the chat")
    add_sampling_flags(out, 128, "a continuation")
    return out


def main(_family: ModelFamily, words: Sequence[str]) -> int:
    return run_command(lambda: _generate(words))


def _generate(words: Sequence[str]) -> None:
    for text in continuations(parser().parse_args(words)):
        print(text)


def continuations(args: argparse.Namespace) -> list[str]:
    """Returns each prompt with its continuation, or with a chat template the answer. Says which, and what is empty.

    Raises ValueError if the flags, the model, its tokenizer or a prompt cannot be used.
    """
    sampling = sampling_of(args)
    if not all(args.prompt):
        raise ValueError("--prompt is empty; give at least one word")
    if args.raw and args.system is not None:
        raise ValueError("--raw writes no turns, and --system is one; give one of them")
    from lightseq.utils import quiet_transformers  # noqa: F401  first: imports take seconds

    directory, tokenizer = load_tokenizer_of(args.checkpoint)
    as_turn = tokenizer.chat_template is not None and not args.raw
    if (args.chat or args.system is not None) and not as_turn:
        given = "--chat" if args.chat else "--system"
        raise ValueError(f"the tokenizer of {args.checkpoint} has no chat template; leave {given} out")
    prompts = [encode(prompt, args.system, tokenizer, as_turn) for prompt in args.prompt]
    answers = write_all(load_writer(args.checkpoint, directory, tokenizer, sampling), prompts, args.seed)
    say(_how(args, as_turn))
    for number, added in enumerate(answers, 1):
        if not tokenizer.decode(added).strip():
            say(f"the answer to prompt {number} is empty: the model stopped after {plural(len(added), 'token')}")
    whole = answers if as_turn else [[*ids, *added] for ids, added in zip(prompts, answers, strict=True)]
    return [tokenizer.decode(ids) for ids in whole]


def encode(prompt: str, system: str | None, tokenizer: Any, as_turn: bool) -> list[int]:
    """Returns the tokens of a prompt. Raises ValueError for characters or templates that cannot be used."""
    from lightseq.data.sources import check_encodable
    from lightseq.data.tokenizer import encode_prompt

    check_encodable(prompt, "--prompt")
    check_encodable(system or "", "--system")
    if not as_turn:
        return encode_prompt(tokenizer, prompt)
    opening = [] if system is None else [{"role": "system", "content": system}]
    try:
        return encode_turns(tokenizer, [*opening, {"role": "user", "content": prompt}], "--prompt")
    except ValueError as error:
        raise ValueError(f"{first_line(error)}; give --raw to continue the prompt as it is written") from error


def write_all(writer: Writer, prompts: Sequence[Sequence[int]], seed: int) -> list[list[int]]:
    """Returns the tokens that the model adds to each prompt, drawn one prompt after the other."""
    import torch

    for ids in prompts:
        writer.check(ids)
    torch.manual_seed(seed)
    return [writer.write(ids) for ids in prompts]


def _how(args: argparse.Namespace, as_turn: bool) -> str:
    if as_turn:
        return "the prompt is a user's turn of the chat template; --raw continues it as it is written"
    return f"the prompt is continued as it is written, {'by --raw' if args.raw else 'without a chat template'}"
