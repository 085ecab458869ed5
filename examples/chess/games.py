"""Chess games as text, one a row: from PGN, from lines of moves, or made up, always legal (python-chess).

python3 examples/chess/games.py lichess.pgn --output data/games.jsonl
python3 examples/chess/games.py --games 1000 --output data/games.jsonl
"""

import argparse
import fcntl
import json
import os
import random
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import chess
import chess.pgn

LONGEST_GAME = 120  # half moves of one that is made up
MOVES_SUFFIXES = (".txt", ".moves")  # a game a line, moves as e4 Nf3 or e2e4 g1f3, numbers or not


def movetext(moves: Iterable[str], result: str) -> str:
    """`1. e4 e5 2. Nf3 … 1-0`."""
    words = []
    for number, move in enumerate(moves):
        words += [f"{number // 2 + 1}.", move] if number % 2 == 0 else [move]
    return " ".join([*words, result])


def random_game(seed: int) -> str:
    """Legal moves drawn evenly: as much as a model can learn of the rules, and nothing of the game."""
    board, draw = chess.Board(), random.Random(seed)
    moves = []
    while not board.is_game_over() and len(moves) < LONGEST_GAME:
        move = draw.choice(list(board.legal_moves))
        moves.append(board.san(move))
        board.push(move)
    return movetext(moves, board.result())


def from_pgn(path: Path) -> Iterator[tuple[str, str | None, str]]:
    """Where a game stands, its text, or None and why not."""
    with path.open(encoding="utf-8", errors="replace") as file:
        number = 0
        while (game := chess.pgn.read_game(file)) is not None:
            number += 1
            where, board, moves = f"{path} game {number}", game.board(), []
            if game.errors:
                yield where, None, f"illegal ({' '.join(str(game.errors[0]).split())})"
                continue
            for move in game.mainline_moves():
                moves.append(board.san(move))
                board.push(move)
            yield where, movetext(moves, game.headers.get("Result", "*")) if moves else None, "without a move"


def from_moves(path: Path) -> Iterator[tuple[str, str | None, str]]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            board, moves = chess.Board(), []
            words = [word.split(".")[-1] for word in line.split() if word not in ("1-0", "0-1", "1/2-1/2", "*")]
            try:
                for word in filter(None, words):
                    move = board.parse_san(word) if not _is_uci(word) else board.parse_uci(word)
                    moves.append(board.san(move))
                    board.push(move)
            except ValueError as error:
                yield f"{path} line {number}", None, f"illegal ({error})"
                continue
            yield f"{path} line {number}", movetext(moves, board.result()) if moves else None, "without a move"


def _is_uci(word: str) -> bool:
    return len(word) in (4, 5) and word[0] in "abcdefgh" and word[2] in "abcdefgh" and (word[1] + word[3]).isdigit()


def read(path: Path) -> Iterator[tuple[str, str | None, str]]:
    if not path.is_file():
        raise ValueError(f"{path} does not exist; name a .pgn file, or one of moves ({', '.join(MOVES_SUFFIXES)})")
    if path.suffix == ".pgn":
        return from_pgn(path)
    if path.suffix in MOVES_SUFFIXES:
        return from_moves(path)
    raise ValueError(f"{path} is neither .pgn nor one of moves ({', '.join(MOVES_SUFFIXES)})")


def write(games: Iterable[tuple[str, str | None, str]], output: Path) -> str:
    """Rows with a `text`, and beside them what was left out and why; of several processes one writes."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.with_suffix(".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        if output.exists():
            return f"{output} is there already"
        partial, kept, skipped = output.with_suffix(f".{os.getpid()}"), 0, list[str]()
        with partial.open("w", encoding="utf-8") as file:
            for where, text, reason in games:
                if text is None:
                    skipped.append(f"{where}: {reason}")
                else:
                    file.write(json.dumps({"text": text}) + "\n")
                    kept += 1
        if not kept:
            partial.unlink()
            raise ValueError(f"no game to write to {output}; {skipped[0] if skipped else 'the source is empty'}")
        meta = {"games": kept, "skipped": len(skipped), "skipped_games": skipped[:100]}
        output.with_suffix(".meta.json").write_text(json.dumps(meta, indent=1) + "\n")
        partial.rename(output)
    shown = f"; left out: {len(skipped)} ({'; '.join(skipped[:3])})" if skipped else ""
    return f"{kept:,} games in {output}{shown}"


def made_up(count: int, seed: int) -> Iterator[tuple[str, str, str]]:
    return ((f"game {i}", random_game(seed * 1_000_003 + i), "") for i in range(count))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?", type=Path, help=".pgn, or moves in .txt or .moves")
    parser.add_argument("--games", type=int, default=1000, help="how many to make up where there is no source (1000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True, help="a .jsonl file to write")
    arguments = parser.parse_args()
    try:
        games = read(arguments.source) if arguments.source else made_up(arguments.games, arguments.seed)
        print(write(games, arguments.output))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
