"""Continues prompts with a trained model, by transformers' own generation in one process.

A chat model gets each prompt as a user's turn of its chat template, and answers it.

lightseq generate outputs/books/checkpoint-1000 --prompt "It was a dark and stormy night"
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from lightseq.config.parser import Parser, count_flag, run_command, whole_number
from lightseq.models.presets import ModelFamily
from lightseq.utils.formatting import first_line, plural

# Whatever generation_config.json asks for, the result is one sequence of ids.
TOKENS_ONLY: Final[dict[str, Any]] = {"num_return_sequences": 1, "return_dict_in_generate": False} | dict.fromkeys(
    ("output_scores", "output_logits", "output_attentions", "output_hidden_states"), False
)


def parser() -> Parser:
    out = Parser(prog="lightseq generate", description="Continues prompts with a trained model, in one process.")
    out.add_argument("checkpoint", help="directory of a checkpoint, a model or an adapter, or a hub id")
    out.add_argument("--prompt", action="append", required=True, help="text to continue; may be given several times")
    out.add_argument(
        "--raw",
        action="store_true",
        help="continue the prompt as it is written; otherwise it is a user's turn if the tokenizer has a chat template",
    )
    out.add_argument("--max_new_tokens", type=count_flag, default=128, help="most tokens to add (default: 128)")
    out.add_argument(
        "--temperature", type=float, default=0.8, help="of sampling; 0 takes the likeliest token (default: 0.8)"
    )
    out.add_argument(
        "--top_p", type=float, default=0.95, help="sample from this share of the probability (default: 0.95)"
    )
    out.add_argument("--seed", type=whole_number, default=0, help="of sampling (default: 0)")
    return out


def main(_family: ModelFamily, words: Sequence[str]) -> int:
    return run_command(lambda: _generate(words))


def _generate(words: Sequence[str]) -> None:
    args = parser().parse_args(words)
    if args.max_new_tokens < 1:
        raise ValueError(f"--max_new_tokens {args.max_new_tokens}: give at least 1")
    if not 0 <= args.temperature < math.inf:
        raise ValueError(f"--temperature {args.temperature}: give a finite number of at least 0")
    if not 0 < args.top_p <= 1:
        raise ValueError(f"--top_p {args.top_p}: give a share above 0, at most 1")
    if not all(args.prompt):
        raise ValueError("--prompt is empty; give at least one word")
    from lightseq.utils import quiet_transformers  # noqa: F401  first: imports take seconds

    for text in continuations(args):
        print(text)


def continuations(args: argparse.Namespace) -> list[str]:
    """Returns each prompt with its continuation, or with a chat template the answer. Says which, and what is empty.

    Raises ValueError if the model, its tokenizer or a prompt cannot be used.
    """
    import torch
    from transformers.utils import logging

    from lightseq.data.tokenizer import encode_prompt
    from lightseq.tools.pretrained import find_directory, load_pretrained, read_model_config
    from lightseq.training.sample_prompts import end_ids

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # it advises packages that make generation faster
    directory = find_directory(args.checkpoint)
    read_model_config(directory)  # a fault of it would look like the tokenizer's
    tokenizer = _load_tokenizer(directory, args.checkpoint)
    template = None if args.raw else tokenizer.chat_template
    prompts = [_text_of(prompt, template) for prompt in args.prompt]
    ids = [tokenizer.encode_part(text).tolist() if template else encode_prompt(tokenizer, text) for text in prompts]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_pretrained(directory, device)
    _check_ids(ids, len(model.get_input_embeddings().weight), args.checkpoint)
    torch.manual_seed(args.seed)
    sampling = {"do_sample": True, "temperature": args.temperature, "top_p": args.top_p}
    settings: dict[str, Any] = sampling if args.temperature else {"do_sample": False}
    ends = sorted(end_ids(model, tokenizer.stop_ids))
    settings |= {"eos_token_id": ends or None, "pad_token_id": (*tokenizer.end, *ends, 0)[0]}
    settings |= {**TOKENS_ONLY, "tokenizer": tokenizer.as_transformers()}
    answers = []
    for prompt in ids:
        given = torch.tensor([prompt], device=device)
        inputs = {"attention_mask": torch.ones_like(given), "max_new_tokens": args.max_new_tokens}
        try:
            with torch.inference_mode():
                found = model.generate(given, **inputs, **settings)  # type: ignore[operator]
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"the GPU has too little memory for {args.checkpoint}; give a smaller --max_new_tokens"
            ) from error
        except Exception as error:  # settings of generation_config.json may be anything
            raise ValueError(_why_not(model, given, inputs | settings, args.checkpoint, error)) from error
        answers.append((found[0].tolist(), found[0, len(prompt) :].tolist()))
    _say(_how(args, template is not None))
    for number, (_, added) in enumerate(answers, 1):
        if not tokenizer.decode(added).strip():
            _say(f"the answer to prompt {number} is empty: the model stopped after {plural(len(added), 'token')}")
    return [tokenizer.decode(added if template else whole) for whole, added in answers]


def _why_not(model: Any, given: Any, inputs: dict[str, Any], checkpoint: str, error: Exception) -> str:
    """Returns an error line that blames generation_config.json if the model generates without it, else the class."""
    import torch
    from transformers import GenerationConfig

    plain = model.get_base_model() if hasattr(model, "peft_config") else model
    plain.generation_config = GenerationConfig()
    reason = f"{type(error).__name__}: {first_line(error)}"
    try:
        with torch.inference_mode():
            plain.generate(given, **inputs | {"max_new_tokens": 1})
    except Exception:
        return f"{checkpoint}: transformers cannot generate with {type(plain).__name__} ({reason}); give another model"
    return f"{checkpoint} cannot generate ({reason}); correct its generation_config.json, or give another checkpoint"


def _say(line: str) -> None:
    """Prints a line beside the texts."""
    print(line, file=sys.stderr, flush=True)


def _how(args: argparse.Namespace, as_turn: bool) -> str:
    if as_turn:
        return "the prompt is a user's turn of the chat template; --raw continues it as it is written"
    return f"the prompt is continued as it is written, {'by --raw' if args.raw else 'without a chat template'}"


def _load_tokenizer(directory: Path, checkpoint: str) -> Any:
    """Loads the tokenizer of a model, or of an adapter's base model if the adapter has none."""
    from lightseq.data.load_tokenizer import has_tokenizer, load_tokenizer
    from lightseq.parts.adapter_files import CONFIG
    from lightseq.tools.pretrained import find_base

    if not has_tokenizer(str(directory)) and (directory / CONFIG).is_file():
        directory = find_base(directory)
    if not has_tokenizer(str(directory)):
        raise ValueError(f"{checkpoint} has no tokenizer; add one with its save_pretrained")
    return load_tokenizer(str(directory))


def _text_of(prompt: str, template: Any) -> str:
    """Returns the text that the model continues. Raises ValueError for characters or templates that cannot be used."""
    from lightseq.data.answers import render_prompt
    from lightseq.data.sources import check_encodable

    check_encodable(prompt, "--prompt")
    if template is None:
        return prompt
    try:
        return render_prompt(prompt, template)
    except ValueError as error:
        raise ValueError(f"{first_line(error)}; give --raw to continue the prompt as it is written") from error


def _check_ids(prompts: Sequence[Sequence[int]], vocab_size: int, checkpoint: str) -> None:
    for ids in prompts:
        if not ids:
            raise ValueError("--prompt has no token in the vocabulary of the tokenizer; give other words")
        if max(ids) >= vocab_size:
            raise ValueError(
                f"--prompt has token id {max(ids)}, outside the model's vocabulary of {vocab_size}; give {checkpoint} "
                "the model's own tokenizer"
            )
