"""Documents of a packed sequence, or nodes of its trees: their boundaries, layout, positions and numbers."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightseq.schedule.layout import Layout, shard
from lightseq.schedule.nodes import ROOT, Nodes


@dataclass(frozen=True, eq=False)
class RowPlaces:
    """Places of rows in a row of trees, in which rows share the tokens of a common prefix, and their weights.

    Weights are not a tensor of the batch, because FSDP2 rounds those to the dtype of the model.
    """

    places: Tensor  # (tokens of all rows,), int64 on the CPU: where each token stands
    has_target: Tensor  # (tokens of all rows,), bool: whether the row learns what this token predicts
    sizes: tuple[int, ...]  # tokens of each row
    # (1, local), float64 on the device: the sums of the rows' weights for this rank's targets; None: losses are of rows
    weights: Tensor | None = None

    def target_counts(self, length: int) -> Tensor:
        """Returns how many rows learn the target of each token, float64 (1, length), on the CPU."""
        return torch.bincount(self.places[self.has_target], minlength=length).double().unsqueeze(0)

    def row_counts(self, length: int) -> Tensor:
        """Returns how many rows hold each token, int64 (1, length), on the CPU."""
        return torch.bincount(self.places, minlength=length).unsqueeze(0)


MIN_BOUNDARIES = 256  # smallest boundary tensor; it doubles as needed, so compiled graphs see few shapes


@dataclass(frozen=True, eq=False)
class Documents:
    """Documents of one packed sequence, the same on all ranks of a group; made by `SequenceGroup.pack`.

    In a row of trees each node is one of them (see `schedule.nodes`).

    Not a tensor, because model wrappers move tensors to the device, and reading them there makes the host wait.
    """

    boundaries: Tensor  # the `node_tensor`, which operators take, int64 on the CPU
    layout: Layout
    count: int  # number of documents without padding
    rows: RowPlaces | None = None  # set where rows were made trees

    @property
    def nodes(self) -> Nodes:
        """Returns the nodes, padding included."""
        return nodes_of(self.boundaries)

    @property
    def padded_boundaries(self) -> tuple[int, ...]:
        """Returns the start of every document, padding included, and the end."""
        return self.nodes.boundaries

    @property
    def length(self) -> int:
        """Returns the tokens of the sequence, padding included."""
        return int(self.boundaries.view(-1, self.boundaries.shape[-1])[0, -1])

    @property
    def are_trees(self) -> bool:
        """Returns whether some nodes have a parent."""
        return self.boundaries.ndim == 2

    @property
    def row_count(self) -> int:
        """Returns the number of rows that became trees, or of documents."""
        return self.count if self.rows is None else len(self.rows.sizes)

    def shard(self, x: Tensor, rank: int, fill: float = 0) -> Tensor:
        """Returns one rank's part of a whole tensor (batch, length, ...), padded with `fill`."""
        return shard(x, self.layout, rank, fill=fill, padded_length=self.length)

    def positions(self, rank: int) -> Tensor:
        """Returns the position of each local token in its document or row, int64 (1, local), on the CPU."""
        every = torch.from_numpy(self.nodes.positions())
        return self.shard(every.unsqueeze(0), rank)

    def document_numbers(self, rank: int) -> Tensor:
        """Returns the number of each local token's document, int64 (local,). Padding belongs to the last document."""
        ends = torch.tensor(self.padded_boundaries[1:])
        positions = self.layout.positions(rank, self.length)
        return torch.bucketize(positions, ends, right=True).clamp_max(self.count - 1)

    def targets_of_rows(self, rank: int) -> tuple[Tensor, Tensor]:
        """Returns the index of each local token with a target, once for each row that learns it, and the row's number.

        Both are int64 on the CPU. Only trees made of rows have them.
        """
        assert self.rows is not None
        positions = self.layout.positions(rank, self.length)
        local = torch.full((self.length,), -1).index_copy(0, positions, torch.arange(len(positions)))
        tokens, rows = local[self.rows.places], torch.arange(self.row_count)
        is_own = self.rows.has_target & (tokens >= 0)
        return tokens[is_own], rows.repeat_interleave(torch.tensor(self.rows.sizes))[is_own]


def node_tensor(nodes: Nodes) -> Tensor:
    """Returns nodes as a tensor of one of few sizes, because compiled graphs depend on it.

    Without parents it has the boundaries (size,), in which the end repeats. With parents it has a second row for them.
    """
    size = MIN_BOUNDARIES
    while size < len(nodes.boundaries):
        size *= 2
    more = size - len(nodes.boundaries)
    rows = [[*nodes.boundaries, *[nodes.length] * more]]
    if nodes.parents is None:
        return torch.tensor(rows[0], dtype=torch.int64)
    rows.append([*nodes.parents, *[ROOT] * (size - len(nodes.parents))])
    return torch.tensor(rows, dtype=torch.int64)


def nodes_of(table: Tensor) -> Nodes:
    """Returns the nodes of a `node_tensor`."""
    boundaries, *parents = table.view(-1, table.shape[-1]).tolist()
    edges = tuple(dict.fromkeys(boundaries))
    return Nodes(edges, tuple(parents[0][: len(edges) - 1]) if parents else None)
