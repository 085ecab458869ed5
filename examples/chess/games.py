"""Chess games as text, one per row: from PGN, from lines of moves, or random. All are legal (python-chess).

python3 examples/chess/games.py lichess.pgn --output data/games.jsonl
python3 examples/chess/games.py --games 1000 --output data/games.jsonl
"""

import argparse
import fcntl
import itertools
import json
import os
import random
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

import chess
import chess.pgn

LONGEST_GAME = 120  # half moves of a random game
RESULTS = ("1-0", "0-1", "1/2-1/2", "*")
Found = tuple[str, str | None, str]  # position of a game in its source, its text or None, reason for None
MOVES_SUFFIXES = (".txt", ".moves")  # one game per line, moves as e4 Nf3 or e2e4 g1f3, with numbers or without


def movetext(moves: Iterable[str], result: str) -> str:
    """Formats a game: `1. e4 e5 2. Nf3 … 1-0`."""
    words = []
    for number, move in enumerate(moves):
        words += [f"{number // 2 + 1}.", move] if number % 2 == 0 else [move]
    return " ".join([*words, result])


def random_game(seed: int) -> str:
    """Returns a game of uniformly random legal moves, from which a model can learn the rules only."""
    board, draw = chess.Board(), random.Random(seed)
    moves = []
    while not board.is_game_over() and len(moves) < LONGEST_GAME:
        move = draw.choice(list(board.legal_moves))
        moves.append(board.san(move))
        board.push(move)
    return movetext(moves, board.result())


def from_pgn(path: Path) -> Iterator[Found]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for number in itertools.count(1):
            try:
                game = chess.pgn.read_game(file)
            except (IndexError, ValueError):  # unbalanced parentheses, which python-chess does not catch
                _pass_over(file)
                yield f"{path} game {number}", None, "unreadable"
                continue
            if game is None:
                return
            yield f"{path} game {number}", *_text_of(game)


def _pass_over(file: TextIO) -> None:
    """Skips the rest of a game, up to an empty line."""
    while (line := file.readline()) and not line.isspace():
        pass


def _text_of(game: chess.pgn.Game) -> tuple[str | None, str]:
    if game.errors:  # check first: it may have no board
        return None, f"illegal ({' '.join(str(game.errors[0]).split())})"
    board, result = game.board(), game.headers.get("Result")
    if type(board) is not chess.Board or board.fen() != chess.STARTING_FEN:
        return None, "not chess from its initial position"
    return _text(board, game.mainline_moves(), result if result in RESULTS else None)


def from_moves(path: Path) -> Iterator[Found]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            board, words = chess.Board(), line.split()
            moves = filter(None, (word.split(".")[-1] for word in words if word not in RESULTS))
            result = next((word for word in words if word in RESULTS), None)
            yield f"{path} line {number}", *_text(board, _parsed(board, moves), result)


def _parsed(board: chess.Board, words: Iterable[str]) -> Iterator[chess.Move]:
    """Yields the moves, each parsed on the board at that time."""
    return (board.parse_uci(word) if _is_uci(word) else board.parse_san(word) for word in words)


def _text(board: chess.Board, moves: Iterable[chess.Move], result: str | None = None) -> tuple[str | None, str]:
    """Returns the text of a game, or None and the reason. Without a result it takes the final board's."""
    written = list[str]()
    try:
        for move in moves:
            if not move:
                return None, "illegal (a null move)"
            written.append(board.san(move))
            board.push(move)
    except ValueError as error:
        return None, f"illegal ({error})"
    return (movetext(written, result or board.result()), "") if written else (None, "without a move")


def _is_uci(word: str) -> bool:
    return len(word) in (4, 5) and word[0] in "abcdefgh" and word[2] in "abcdefgh" and (word[1] + word[3]).isdigit()


def read(path: Path) -> Iterator[Found]:
    if not path.is_file():
        raise ValueError(f"{path} does not exist; give a .pgn file, or a file of moves ({', '.join(MOVES_SUFFIXES)})")
    if path.suffix == ".pgn":
        return from_pgn(path)
    if path.suffix in MOVES_SUFFIXES:
        return from_moves(path)
    raise ValueError(f"{path} is neither a .pgn file nor a file of moves ({', '.join(MOVES_SUFFIXES)})")


def source_of(path: Path | None, count: int, seed: int) -> tuple[Iterator[Found], dict[str, object]]:
    """Returns the games of a file, or random ones without a file, and what identifies their source."""
    if path is None:
        return made_up(count, seed), {"made_up": count, "seed": seed}
    games, facts = read(path), path.stat()
    return games, {"path": str(path.resolve()), "bytes": facts.st_size, "modified_ns": facts.st_mtime_ns}


def write(games: Iterable[Found], source: dict[str, object], output: Path) -> str:
    """Writes rows with a `text`, and beside them a list of what was left out and why. Returns a closing line.

    Of several processes one writes, and all return the same line. Rows of the same source are not written again.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.with_suffix(".lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        meta = _meta(output)
        for path in (output, output.with_suffix(".meta.json")):
            if path.exists() and meta is None:
                raise ValueError(f"{path} exists and was not written by this script; choose another, or remove it")
        if meta is None or meta.get("source") != source or not output.exists():
            meta = _write(games, source, output)
    skipped = f"; left out: {meta['skipped']} ({'; '.join(meta['skipped_games'][:3])})" if meta["skipped"] else ""
    return f"{meta['games']:,} games in {output}{skipped}"


def _meta(output: Path) -> dict[str, Any] | None:
    """Returns the metadata beside a file of games; None if there is none."""
    try:
        found = json.loads(output.with_suffix(".meta.json").read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and "skipped_games" in found else None


def _write(games: Iterable[Found], source: dict[str, object], output: Path) -> dict[str, Any]:
    partial, kept, skipped = output.with_suffix(f".{os.getpid()}"), 0, list[str]()
    try:
        with partial.open("w", encoding="utf-8") as file:
            for where, text, reason in games:
                if text is None:
                    skipped.append(f"{where}: {reason}")
                else:
                    file.write(json.dumps({"text": text}) + "\n")
                    kept += 1
        if not kept:
            raise ValueError(f"no game to write to {output}; {skipped[0] if skipped else 'the source is empty'}")
        meta = {"source": source, "games": kept, "skipped": len(skipped), "skipped_games": skipped[:100]}
        output.unlink(missing_ok=True)  # first, or the new meta.json would stand beside games of another source
        output.with_suffix(".meta.json").write_text(json.dumps(meta, indent=1) + "\n")
        partial.rename(output)
    finally:
        partial.unlink(missing_ok=True)
    return meta


def made_up(count: int, seed: int) -> Iterator[tuple[str, str, str]]:
    return ((f"game {i}", random_game(seed * 1_000_003 + i), "") for i in range(count))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?", type=Path, help=".pgn, or moves in .txt or .moves")
    parser.add_argument(
        "--games", type=int, default=1000, help="number of random games without a source (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random games (default: %(default)s)")
    parser.add_argument("--output", type=Path, required=True, help="a .jsonl file to write")
    arguments = parser.parse_args()
    try:
        print(write(*source_of(arguments.source, arguments.games, arguments.seed), arguments.output))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
