"""Fine-tunes CodeLlama-7B on chess games, on one GPU or many.

python3 -m torch.distributed.run --nproc_per_node=4 examples/chess/finetune.py --output_dir outputs/chess \\
    --model_name_or_path models/CodeLlama-7b-hf --data_path lichess.pgn --gradient_checkpointing
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import games
import torch

sys.path.insert(1, str(Path(__file__).resolve().parents[2]))  # runs uninstalled

from lightseq.cli import BOTH
from lightseq.config.flag_names import normalize_flag
from lightseq.config.parser import Parser
from lightseq.training.command import main as train


def parser() -> argparse.ArgumentParser:
    out = Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
        epilog="All flags of training work too: lightseq train --help",
    )  # fmt: skip
    out.add_argument("--model_name_or_path", default="codellama/CodeLlama-7b-hf", help="(default: %(default)s)")
    out.add_argument("--data_path", type=Path, help=".pgn, moves, or rows with a text (default: random games)")
    out.add_argument("--games", type=int, default=1000, help="number of random games (default: %(default)s)")
    out.add_argument("--output_dir", type=Path, required=True)
    out.add_argument("--batch_size_per_device", type=int, default=1, help="games per forward pass (default: 1)")
    out.add_argument(
        "--gradient_accumulation_steps", type=int, default=8,
        help="forward passes per step on one GPU; several GPUs share them (default: %(default)s)",
    )  # fmt: skip
    out.add_argument("--gradient_checkpointing", action="store_true", help="recompute everything except attention")
    out.add_argument("--sequence_parallel_size", type=int, default=1, help="GPUs that share a game (default: 1)")
    out.add_argument("--no_fsdp", action="store_true", help="replicate the model on every GPU (DDP)")
    return out


def flags_of(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns the flags of this script and those for training; both may be spelled with hyphens."""
    return parser().parse_known_args([normalize_flag(word) for word in argv])


def passes(asked: int, data_ranks: int) -> tuple[int, str | None]:
    """Returns the forward passes per step on each rank, at least 1, and a note if the number was raised."""
    if asked < 1:
        raise ValueError(f"--gradient_accumulation_steps {asked}: give at least 1")
    each = -(-asked // data_ranks)
    if each * data_ranks == asked:
        return each, None
    uneven = f"--gradient_accumulation_steps {asked} is not a multiple of {data_ranks} ranks"
    return each, f"{uneven}; raised to {each} on each, so a step takes {each * data_ranks} passes instead of {asked}"


def words(arguments: argparse.Namespace, more: Sequence[str], data: Path, world: int) -> tuple[list[str], str | None]:
    """Returns the command line of lightseq, in which later flags override earlier ones, and a note or None."""
    sequence = arguments.sequence_parallel_size
    if sequence < 1:
        raise ValueError(f"--sequence_parallel_size {sequence}: give at least 1")
    each, note = passes(arguments.gradient_accumulation_steps, max(1, world // sequence))
    found = ["--model_name_or_path", arguments.model_name_or_path, "--data_path", str(data)]
    found += ["--output_dir", str(arguments.output_dir), "--gradient_accumulation_steps", str(each)]
    found += ["--per_device_train_batch_size", str(arguments.batch_size_per_device)]
    found += ["--gradient_checkpointing", "True"] if arguments.gradient_checkpointing else ["--remat", "none"]
    found += ["--fsdp", ""] if arguments.no_fsdp else []
    found += ["--sequence_parallel_size", str(sequence), "--model_max_length", "1024"]
    half = any(word.split("=")[0] == "--fp16" for word in more)
    found += ["--bf16", "True"] if torch.cuda.is_available() and not half else []
    return [*found, *more], note


def rows(arguments: argparse.Namespace) -> tuple[Path, str | None]:
    """Returns the file of games as rows, and a line about them. A file of games is converted once, beside the run."""
    source = arguments.data_path
    if source is not None and source.suffix not in (".pgn", *games.MOVES_SUFFIXES):
        return source, None
    output = Path(arguments.output_dir) / "data" / f"{source.stem if source else 'made-up'}.jsonl"
    return output, games.write(*games.source_of(source, arguments.games, seed=0), output)


def main() -> int:
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    try:
        arguments, more = flags_of(sys.argv[1:])
        data, summary = rows(arguments)
        command, note = words(arguments, more, data, world)
    except (ValueError, OSError) as error:
        if rank == 0:
            print(f"error: {error}", file=sys.stderr)
        return 2
    for line in (summary, f"note: {note}" if note else None):
        if line and rank == 0:
            print(line, flush=True)
    return train(replace(BOTH, program="examples/chess/finetune.py"), command)


if __name__ == "__main__":
    sys.exit(main())
