"""A trained model that writes text in one process, by transformers' own generation."""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lightseq.config.parser import Parser, count_flag, whole_number
from lightseq.utils.formatting import first_line

Turn = dict[str, str]  # `role` and `content`
# Whatever generation_config.json asks for, the result is one sequence of ids.
TOKENS_ONLY: Final[dict[str, Any]] = {"num_return_sequences": 1, "return_dict_in_generate": False} | dict.fromkeys(
    ("output_scores", "output_logits", "output_attentions", "output_hidden_states"), False
)


def add_sampling_flags(parser: Parser, most_tokens: int, of: str) -> None:
    """Adds the flags of `sampling_of`, with `most_tokens` as the default limit of what `of` names."""
    add = parser.add_argument
    limit = f"most tokens of {of} (default: {most_tokens})"
    add("--max_new_tokens", type=count_flag, default=most_tokens, metavar="N", help=limit)
    heat = "of sampling; 0 takes the likeliest token (default: 0.8)"
    add("--temperature", type=float, default=0.8, metavar="X", help=heat)
    add(
        "--top_p",
        type=float,
        default=0.95,
        metavar="X",
        help="sample from this share of the probability (default: 0.95)",
    )
    add("--seed", type=whole_number, default=0, metavar="N", help="of sampling (default: 0)")


def sampling_of(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments of transformers' `generate`. Raises ValueError for impossible values of the flags."""
    if args.max_new_tokens < 1:
        raise ValueError(f"--max_new_tokens {args.max_new_tokens}: give at least 1")
    if not 0 <= args.temperature < math.inf:
        raise ValueError(f"--temperature {args.temperature}: give a finite number of at least 0")
    if not 0 < args.top_p <= 1:
        raise ValueError(f"--top_p {args.top_p}: give a share above 0, at most 1")
    limit = {"max_new_tokens": args.max_new_tokens}
    if not args.temperature:
        return {**limit, "do_sample": False}
    return {**limit, "do_sample": True, "temperature": args.temperature, "top_p": args.top_p}


@dataclass(frozen=True)
class Writer:
    """A model in evaluation mode, its tokenizer, and how tokens are drawn."""

    name: str  # the checkpoint as given
    model: Any
    tokenizer: Any
    sampling: dict[str, Any]

    def write(self, ids: Sequence[int], streamer: Any = None) -> list[int]:
        """Returns the tokens that the model adds to a prompt; `streamer` is one of transformers.

        Raises ValueError if the model cannot generate, or the GPU has too little memory.
        """
        import torch

        from lightseq.training.sample_prompts import end_ids

        self.check(ids)
        ends = sorted(end_ids(self.model, self.tokenizer.stop_ids))
        settings = {**self.sampling, "eos_token_id": ends or None, "pad_token_id": (*self.tokenizer.end, *ends, 0)[0]}
        settings |= {**TOKENS_ONLY, "tokenizer": self.tokenizer.as_transformers()}
        given = torch.tensor([list(ids)], device=self.model.get_input_embeddings().weight.device)
        settings["attention_mask"] = torch.ones_like(given)
        try:
            with torch.inference_mode():
                found = self.model.generate(given, streamer=streamer, **settings)
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"the GPU has too little memory for {self.name}; give a smaller --max_new_tokens"
            ) from error
        except Exception as error:  # settings of generation_config.json may be anything
            raise ValueError(self._why_not(given, settings, error)) from error
        return found[0, len(ids) :].tolist()  # type: ignore[no-any-return]

    def check(self, ids: Sequence[int]) -> None:
        """Raises ValueError if the model has no embedding for a token of a prompt, or there is none."""
        if not ids:
            raise ValueError("--prompt has no token in the vocabulary of the tokenizer; give other words")
        if max(ids) >= (size := len(self.model.get_input_embeddings().weight)):
            raise ValueError(
                f"--prompt has token id {max(ids)}, outside the model's vocabulary of {size}; give {self.name} "
                "the model's own tokenizer"
            )

    def _why_not(self, given: Any, settings: dict[str, Any], error: Exception) -> str:
        """Returns an error line that blames generation_config.json if the model generates without it, or the class."""
        import torch
        from transformers import GenerationConfig

        plain = self.model.get_base_model() if hasattr(self.model, "peft_config") else self.model
        plain.generation_config = GenerationConfig()
        reason = f"{type(error).__name__}: {first_line(error)}"
        try:
            with torch.inference_mode():
                plain.generate(given, **settings | {"max_new_tokens": 1})
        except Exception:
            kind = type(plain).__name__
            return f"{self.name}: transformers cannot generate with {kind} ({reason}); give another model"
        return f"{self.name} cannot generate ({reason}); correct its generation_config.json, or give another checkpoint"


def encode_turns(tokenizer: Any, turns: Sequence[Turn], where: str) -> list[int]:
    """Returns the tokens of a chat and of what precedes its next answer.

    Raises ValueError, which begins with `where`, if the chat template fails.
    """
    from lightseq.data.answers import render_turns
    from lightseq.data.chat_template import TemplateInputs

    [text] = render_turns([(list(turns), True)], TemplateInputs(), tokenizer.chat_template, where)
    return tokenizer.encode_part(text).tolist()  # type: ignore[no-any-return]


def load_tokenizer_of(checkpoint: str) -> tuple[Path, Any]:
    """Returns the directory of a checkpoint and its tokenizer. Raises ValueError if it is none, or has none."""
    from transformers.utils import logging

    from lightseq.tools.pretrained import find_directory, read_model_config

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # it advises packages that make generation faster
    directory = find_directory(checkpoint)
    read_model_config(directory)  # else a faulty config would look like a faulty tokenizer
    return directory, _load_tokenizer(directory, checkpoint)


def load_writer(checkpoint: str, directory: Path, tokenizer: Any, sampling: dict[str, Any]) -> Writer:
    """Loads a model onto the first GPU, or the CPU without one. Raises ValueError if it cannot be loaded."""
    import torch

    from lightseq.kernels.attention.base import compute_capability
    from lightseq.tools.pretrained import load_pretrained

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_pretrained(directory, device)
    if (0, 0) < compute_capability(device) < (8, 0) and to_float16(model):
        say("bfloat16 weights are read as float16, because this GPU's tensor cores have no bfloat16")
    return Writer(checkpoint, model, tokenizer, sampling)


def to_float16(model: Any) -> bool:
    """Casts weights and buffers in bfloat16. Returns whether there were any."""
    import torch

    found = [x for x in (*model.parameters(), *model.buffers()) if x.dtype is torch.bfloat16]
    for x in found:
        x.data = x.data.half()
    return bool(found)


def say(line: str) -> None:
    """Prints a line to stderr, apart from the texts."""
    print(line, file=sys.stderr, flush=True)


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
