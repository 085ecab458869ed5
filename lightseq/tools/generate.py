"""Continues prompts with a trained model, by transformers' own generation in one process.

lightseq generate outputs/books/checkpoint-1000 --prompt "It was a dark and stormy night"
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from lightseq.config.parser import Parser, count_flag, run_command, whole_number
from lightseq.models.presets import ModelFamily
from lightseq.utils.formatting import first_line

ADAPTER_CONFIG: Final = "adapter_config.json"  # of peft


def parser() -> Parser:
    out = Parser(prog="lightseq generate", description="Continues prompts with a trained model, in one process.")
    out.add_argument("checkpoint", help="directory of a checkpoint, a model or an adapter, or a hub id")
    out.add_argument("--prompt", action="append", required=True, help="text to continue; may be given several times")
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
    from lightseq.utils import quiet_transformers  # noqa: F401  first: imports take seconds

    for text in continuations(args):
        print(text)


def continuations(args: argparse.Namespace) -> list[str]:
    """Returns each prompt with its continuation. Raises ValueError if the model or its tokenizer cannot be loaded."""
    import torch
    from transformers import AutoTokenizer
    from transformers.utils import logging

    from lightseq.training.sample_prompts import end_ids

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # it advises packages that make generation faster
    model = _load_model(args.checkpoint)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(args.checkpoint, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"{args.checkpoint} has no tokenizer; add one with its save_pretrained") from error
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device).eval()
    torch.manual_seed(args.seed)
    sampling = {"do_sample": True, "temperature": args.temperature, "top_p": args.top_p}
    settings: dict[str, Any] = sampling if args.temperature else {"do_sample": False}
    settings |= {
        "eos_token_id": sorted(end_ids(model, [tokenizer.eos_token_id])),
        "pad_token_id": tokenizer.eos_token_id,
    }
    found = []
    for prompt in args.prompt:
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(device)
        if inputs["input_ids"].shape[1] == 0:
            raise ValueError("--prompt is empty; give at least one word")
        with torch.inference_mode():
            ids = model.generate(**inputs, max_new_tokens=args.max_new_tokens, **settings)
        found.append(tokenizer.decode(ids[0], skip_special_tokens=True))
    return found


def _load_model(checkpoint: str) -> Any:
    from transformers import AutoConfig

    from lightseq.models.build import model_class
    from lightseq.models.family import MODEL_CONFIGS, model_within
    from lightseq.models.hub import hub_error

    directory = Path(checkpoint)
    if directory.is_dir() and not any((directory / name).is_file() for name in MODEL_CONFIGS):
        raise ValueError(f"{checkpoint} is a directory without config.json; give {model_within(directory)}")
    if not directory.exists() and checkpoint.count("/") > 1:  # no id of the Hub
        raise ValueError(f"{checkpoint} does not exist; give a directory, or a Hub id such as Qwen/Qwen3-0.6B")
    if not directory.exists() and (reason := hub_error(checkpoint, "config.json")):
        raise ValueError(f"{checkpoint} is not a directory, and cannot be fetched from the hub ({reason}); check it")
    kind: Any = None
    if (directory / ADAPTER_CONFIG).is_file():
        try:
            from peft import AutoPeftModelForCausalLM
        except ImportError as error:
            raise ValueError(f"{checkpoint} is an adapter, which needs peft; pip install peft") from error
        kind = AutoPeftModelForCausalLM
    try:
        if kind is None:  # the class of a model with images is not among the causal ones
            kind = model_class(AutoConfig.from_pretrained(checkpoint, trust_remote_code=False))
        return kind.from_pretrained(checkpoint, dtype="auto", trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"{checkpoint} is not a model that transformers can load: {first_line(error)}") from error
