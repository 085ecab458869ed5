"""Writes training data: synthetic tokens, or tokenized text."""

from __future__ import annotations

import sys
import textwrap
from argparse import Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from lightseq.config.lengths import length_flag
from lightseq.config.parser import Parser, whole_number
from lightseq.data.column_flags import split_columns
from lightseq.data.load_tokenizer import load_tokenizer
from lightseq.data.token_cache import tokenizer_batches
from lightseq.utils.formatting import first_line
from lightseq.utils.progress import progress_bar

from . import PROGRAM
from .output import limit_tokens, write
from .sources import SkippedTexts, expand_sources, read_texts
from .synthetic import KINDS, Synthetic, answer_targets, check_spec, draw_document, needle_depths

TEXT_HELP = (
    "SOURCE is a file (one document), a .jsonl, .jsonl.gz, .ndjson, .arrow or .parquet file (one document per "
    "row), a folder (all files below it "
    "except hidden ones), a quoted glob, hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT (a Hugging Face data set, "
    "streamed), or stdlib (the modules of the running Python's standard library, without its tests). Each document "
    "ends with the tokenizer's end-of-document id. Files and rows that cannot be read are left out and counted."
)
TARGETS = ("all", "answer")


def parser() -> Parser:
    """Returns the parser of both commands."""
    example = f"{PROGRAM} synthetic --kind needle --documents 100 --length 4096 --output data/needle"
    root = Parser(prog=PROGRAM, description=f"{__doc__}\n{example}", formatter_class=RawDescriptionHelpFormatter)
    commands = root.add_subparsers(dest="command", required=True)
    described = "\n".join(
        textwrap.fill(f"{name}: {kind.help}", 80, initial_indent="  ", subsequent_indent="    ")
        for name, kind in KINDS.items()
    )
    synthetic = commands.add_parser(
        "synthetic",
        help="random tokens",
        description=f"kinds:\n{described}",
        formatter_class=RawDescriptionHelpFormatter,
    )
    synthetic.add_argument("--kind", choices=list(KINDS), required=True, help="structure of the documents, see above")
    synthetic.add_argument("--documents", type=whole_number, required=True, help="number of documents")
    synthetic.add_argument("--length", type=length_flag, required=True, help="tokens per document, such as 8192 or 8K")
    synthetic.add_argument(
        "--shortest",
        type=length_flag,
        metavar="N",
        help="draw each length from N, 2N, 4N ... --length; every length has as many tokens on average "
        "(default: all documents have --length)",
    )
    synthetic.add_argument(
        "--targets",
        choices=TARGETS,
        default=TARGETS[0],
        help="tokens that are trained on; answer: only the last token of a needle document (default: %(default)s)",
    )
    synthetic.add_argument(
        "--vocab_size", type=whole_number, default=512, help="number of token ids (default: %(default)s)"
    )
    synthetic.add_argument(
        "--seed", type=whole_number, default=0, help="the same seed gives the same documents (default: %(default)s)"
    )
    text = commands.add_parser("text", help="tokenized text", description=TEXT_HELP)
    text.add_argument("sources", metavar="SOURCE", nargs="+", help="source of texts, see above")
    text.add_argument(
        "--tokenizer", default="byte", help="byte (256 bytes and an end id), a directory, or a hub id (default: byte)"
    )
    text.add_argument("--column", default="text", help="column of rows that holds the text (default: %(default)s)")
    text.add_argument(
        "--ignore_columns",
        metavar="NAMES",
        help="columns of rows to ignore, separated by commas; others that are not known are refused",
    )
    text.add_argument(
        "--max_tokens", type=length_flag, help="stop after this many, cutting the last document (default: no limit)"
    )
    for command in (synthetic, text):
        command.add_argument("--output", type=Path, required=True, help="directory to create, or a .pkl file")
        command.add_argument("--force", action="store_true", help="replace the output if it exists")
    return root


def make_synthetic(arguments: Namespace) -> str:
    """Writes synthetic documents and returns the closing line."""
    spec = Synthetic(
        kind=arguments.kind,
        documents=arguments.documents,
        length=arguments.length,
        vocab_size=arguments.vocab_size,
        seed=arguments.seed,
        shortest=arguments.shortest,
    )
    check_spec(spec)
    answers_only = arguments.targets == "answer"
    if answers_only and spec.kind != "needle":
        raise ValueError(f"--targets answer needs --kind needle, not {spec.kind}")
    if answers_only and arguments.output.suffix == ".pkl":
        raise ValueError(f"--targets answer needs a directory, but --output is {arguments.output}")
    extra_meta: dict[str, object] = {
        "tokenizer": None,
        "source": f"synthetic {spec.kind}",
        "seed": spec.seed,
        "skipped": {},
    }
    extra = {"needle_depth": needle_depths(spec)} if spec.kind == "needle" else {}
    drawn = progress_bar((draw_document(spec, index) for index in range(spec.documents)), spec.documents)
    targets = answer_targets if answers_only else None
    return write(arguments.output, drawn, spec.vocab_size, lambda: extra_meta, extra, arguments.force, targets)


def make_text(arguments: Namespace) -> str:
    """Writes tokenized texts and returns the closing line."""
    if arguments.max_tokens is not None and arguments.max_tokens < 1:
        raise ValueError(f"--max_tokens {arguments.max_tokens} is too small; give 1 or more, or leave it out")
    tokenizer = load_tokenizer(arguments.tokenizer)
    sources, ignored = expand_sources(arguments.sources), split_columns(arguments.ignore_columns)
    skipped = SkippedTexts()

    def texts() -> Iterator[str]:
        for source in sources:
            yield from read_texts(source, arguments.column, skipped, ignored)

    def extra_meta() -> Mapping[str, object]:
        origin = " ".join(arguments.sources)
        fingerprint = tokenizer.vocabulary_fingerprint
        return {
            "tokenizer": tokenizer.name,
            "tokenizer_fingerprint": fingerprint,
            "source": origin,
            "seed": None,
            **skipped.facts(),
        }

    encoded = (ids for batch in tokenizer_batches(texts()) for ids in tokenizer.encode_batch(batch, whole=True))
    tokenised = progress_bar(limit_tokens(arguments.max_tokens, encoded))
    try:
        closing = write(arguments.output, tokenised, tokenizer.vocab_size, extra_meta, {}, arguments.force)
    finally:  # explains an empty output if every file is unreadable
        for message in skipped.messages:
            print(f"data_gen: left out: {message}", file=sys.stderr)
    return closing + (f"; left out: {skipped}" if skipped.counts else "")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command. For refused input it prints one line and returns 2."""
    try:
        arguments = parser().parse_args(argv)
        print({"synthetic": make_synthetic, "text": make_text}[arguments.command](arguments))
    except (ValueError, OSError) as error:
        print(f"data_gen: error: {first_line(error)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
