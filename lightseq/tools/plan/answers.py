"""Answers to one prompt as `lightseq plan --documents 8x32K+2K` names them, whose rows become a tree."""

from dataclasses import dataclass

from lightseq.architecture.inspection import Architecture
from lightseq.config.lengths import parse_tokens
from lightseq.plan.document_lengths import DocumentLengths, area_of_nodes
from lightseq.schedule.nodes import ROOT, Nodes
from lightseq.utils.formatting import plural


@dataclass(frozen=True)
class Answers:
    """Answers to one prompt, whose rows become a tree."""

    rows: int
    prompt: int  # tokens
    answer: int  # tokens

    @property
    def tree(self) -> Nodes:
        """Returns the tree. Each branch begins with a copy of the prompt's last token."""
        shared, branch = self.prompt - 1, self.answer + 1
        if not shared:
            return Nodes(tuple(range(0, self.rows * branch + 1, branch)))
        edges = range(shared, shared + self.rows * branch + 1, branch)
        return Nodes((0, *edges), (ROOT, *(0 for _ in range(self.rows))))

    def describe(self, length: int) -> str:
        """Describes the saving of a tree, and how many trees fill a row of `length` tokens."""
        tokens, rows = self.tree.length, self.rows * (self.prompt + self.answer)
        fits = plural(length // tokens, "tree")
        return f"a tree of {self.rows} answers has {tokens:,} tokens instead of {rows:,}; {fits} in a sequence"

    def lengths(self, length: int, architecture: Architecture) -> DocumentLengths:
        """Returns the documents of rows that hold as many trees as fit into `length` tokens.

        Raises ValueError if none fits.
        """
        tree = self.tree
        if tree.length > length:
            raise ValueError(
                f"--documents: {self.rows} answers of {self.answer:,} tokens to a prompt of {self.prompt:,} are a tree "
                f"of {tree.length:,} tokens; give a --model_max_length of at least that"
            )
        area = length // tree.length * area_of_nodes(tree, architecture)
        tokens = self.prompt + self.answer
        return DocumentLengths(float(tokens), area / length, tokens)


def answers_of(text: str) -> Answers:
    """Parses `8x32K+2K`: 8 answers of 2K tokens to a prompt of 32K. Raises ValueError for anything else."""
    try:
        rows, sizes = text.split("x")
        found = Answers(int(rows), *map(parse_tokens, sizes.split("+")))
    except (TypeError, ValueError):
        found = Answers(0, 0, 0)
    if min(found.rows, found.prompt, found.answer) < 1:
        raise ValueError(f"--documents {text}: write 8x32K+2K for 8 answers of 2K tokens to a prompt of 32K")
    return found
