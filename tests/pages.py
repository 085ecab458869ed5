"""Pages of the documentation and the commands on them, for the tests that check and type these."""

import contextlib
import io
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any

from torch.distributed.run import get_args_parser

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("dev/*.md"), *ROOT.glob("examples/**/*.md")])
GUIDES = [page for page in PAGES if page.parent in (ROOT, ROOT / "docs", ROOT / "examples")]
# Programs of others, and words of the shell. What they start may be ours: `podman run lightseq launch/local.sh ...`.
OTHERS = (
    "pip", "podman", "enroot", "sky", "sbatch", "envsubst", "source", "export", "printf", "for", "done", "vllm",
    "axolotl",
)  # fmt: skip
LAUNCHER = re.compile(r"launch/(\w+\.sh|slurm/\w+\.sbatch)")
NOWHERE = ("--data_path", "nowhere", "--output_dir", "nowhere")
MADE_UP = ("--model_name_or_path", "nowhere", *NOWHERE)  # stand for flags that a command takes from elsewhere
OURS = ("lightseq", "llama2", "llama3", "data_gen", "launch", "analysis", "benchmarks", "examples", "docs", "tests")


@dataclass(frozen=True)
class Command:
    """Words of a command without redirections and comments, and the variables in front of them."""

    variables: tuple[str, ...]
    words: tuple[str, ...]

    @property
    def program(self) -> tuple[str, ...]:
        """Returns the words without launchers and the interpreter: `launch/sweep.py ...`, `-m lightseq plan ...`."""
        launched = next((place for place, word in enumerate(self.words) if LAUNCHER.fullmatch(word)), None)
        if launched is not None:
            return self._launched(*self.words[launched:])
        words = list(self.words)
        if words[:3] == ["python3", "-m", "torch.distributed.run"]:
            words = ["torchrun", *words[3:]]
        if words[0] == "torchrun":
            launch = accepted_by(get_args_parser().parse_args, words[1:])
            module = ["-m"] if launch.module else []
            return (*module, launch.training_script, *launch.training_script_args)
        if words[0] == "lightseq":
            return ("-m", *words)
        return tuple(words[1:] if words[0] in ("python3", "python") else words)

    def _launched(self, script: str, *words: str) -> tuple[str, ...]:
        """Returns the program that a launcher runs. Slurm jobs and extend.sh take some flags from variables."""
        if script.endswith("extend.sh"):
            assert {"MODEL", "DATA", "OUTPUT"} <= {word.partition("=")[0] for word in self.variables}
            return ("llama3/train.py", *MADE_UP, *words)
        if not words:
            assert script.endswith(".sbatch"), f"{script} needs a command"
            return ("llama3/train.py", *MADE_UP)
        name, *flags = words
        program = (f"{name}/train.py",) if name in ("llama2", "llama3") else ("-m", "lightseq", name)
        return (*program, *([] if script.endswith("local.sh") else MADE_UP), *flags)


def command_lines(page: Path) -> list[str]:
    """Returns the commands of a page: lines of blocks without a language, or marked bash, and cells of tables.

    A line that ends with \\ goes on in the next.
    """
    cells = re.findall(r"(?<=\| `)(?:python3|make|launch/\S+|lightseq \w+) [^`|]+(?=` \|)", page.read_text())
    blocks = re.findall(r"^ *```(\w*)\n(.*?)^ *```", page.read_text(), flags=re.M | re.S)
    shell = "\n".join(block for language, block in blocks if language in ("", "bash"))
    lines = [line.strip() for line in re.sub(r"\\\n *", "", shell).splitlines()]
    return [line for line in (*lines, *cells) if line]


def split(line: str) -> Iterator[Command]:
    """Yields the commands of a line, which `|`, `&&` and `;` divide."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    try:
        every = [*lexer]
    except ValueError as error:
        raise AssertionError(f"is not a command: {error}") from None
    for divides, group in groupby(every, lambda word: word != "" and set(word) <= set("|&;")):
        words = [*takewhile(lambda word: word == "" or not set(word) <= set("<>"), group)]
        variables = [*takewhile(re.compile(r"[A-Z_]+=").match, words)]
        words = words[len(variables) :]
        words = words[1:] if words[:1] == ["do"] else words
        if words and not divides:
            yield Command(tuple(variables), tuple(words))


def accepted_by(parse: Callable[[list[str]], Any], words: Sequence[str]) -> Any:
    """Returns what a parser makes of words. Fails with what it prints if it does not take them."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return parse(list(words))
    except (ValueError, SystemExit) as error:
        raise AssertionError(said.getvalue().strip() or str(error)) from None
