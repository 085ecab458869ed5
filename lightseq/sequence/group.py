"""The ranks that share a sequence: their layout, their transport, and the part of a sequence that each one holds."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor

from lightseq.comm.transport import Transport
from lightseq.schedule.documents import packed_layout, packed_length
from lightseq.schedule.layout import Layout, shard
from lightseq.schedule.nodes import Nodes, check_nodes
from lightseq.sequence.documents import Documents, node_tensor, nodes_of


@dataclass
class BatchState:
    """State of the batch that a model computes now."""

    packed: bool = False  # the batch is packed


@dataclass(frozen=True, eq=False)
class SequenceGroup:
    """Ranks that share a sequence, as seen by one of them; made by `make_sequence_group`.

    A custom operator takes only tensors, numbers and strings, so it gets `name`, and `find_group` returns the group.
    """

    name: str
    process_group: dist.ProcessGroup
    rank: int  # in the group
    layout: Layout  # for sequences that are not packed
    transport: Transport
    balances_documents: bool  # every packed sequence gets a layout that balances the work on its documents
    batch: BatchState = field(default_factory=BatchState)

    def check_documents(self, boundaries: Tensor | None) -> None:
        """Raises ValueError if the batch is packed and a layer did not pass its documents on."""
        if boundaries is None and self.batch.packed:
            raise ValueError(
                "the batch holds packed documents, but the model's layers do not pass them on; train without packing, "
                "or use another model"
            )

    def __deepcopy__(self, _memo: object) -> "SequenceGroup":
        """Returns the group itself: a copy of an enabled model runs over the same ranks."""
        return self

    def shard(self, x: Tensor, fill: float = 0, documents: Documents | None = None) -> Tensor:
        """Returns this rank's part of a whole tensor (batch, length, ...), padded with `fill`: (batch, local, ...)."""
        if documents is not None:
            return documents.shard(x, self.rank, fill)
        return shard(x, self.layout, self.rank, fill=fill)

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Returns the global positions of this rank's tokens, int64 (1, local). Padding gets the last position."""
        padded = self.layout.padded_length(length)
        return self.layout.positions_on(device, self.rank, padded).clamp_max(length - 1).unsqueeze(0)

    def pack(
        self, boundaries: Sequence[int], length: int | None = None, parents: Sequence[int] | None = None
    ) -> Documents:
        """Packs documents into a sequence of `length` tokens (default: the end of the last document).

        `boundaries` are the first token of each document and the end of the last. With `parents`, they are nodes of
        trees: each has the index of its parent, or -1 (see `schedule.nodes`). The sequence is padded to `length`, and
        further if the layout needs it. Raises ValueError if boundaries do not rise from 0, or exceed `length`, and for
        nodes that do not stand depth first.
        """
        length = int(boundaries[-1]) if length is None else length
        real = check_nodes(boundaries, parents, length)
        whole = real.padded(packed_length(self.layout, self.balances_documents, length))
        return Documents(node_tensor(whole), self.packed_layout(whole), len(real.boundaries) - 1)

    def packed_layout(self, nodes: Nodes) -> Layout:
        """Returns the layout of a packed sequence with these nodes, padding included."""
        return packed_layout(self.layout, self.balances_documents, nodes)

    def layout_and_nodes(self, local: int, boundaries: Tensor | None) -> tuple[Layout, Nodes]:
        """Returns the layout of a sequence and its nodes. Documents have no parents.

        `local` tokens are on each rank. `boundaries` are the `node_tensor` of packed documents, or None.
        """
        if boundaries is None:
            return self.layout, Nodes((0, local * self.layout.world))
        nodes = nodes_of(boundaries)
        return self.packed_layout(nodes), nodes

    def match(self, documents: Documents) -> bool:
        """Returns whether the documents were packed for ranks that hold the same parts of a sequence."""
        whole = documents.nodes
        if whole.length != packed_length(self.layout, self.balances_documents, whole.length):
            return False
        return self.packed_layout(whole) == documents.layout


def _stem(layout: Layout) -> str:
    return f"{layout.kind}-{layout.world}-{layout.ulysses}x{layout.chunks_per_rank}"


_GROUPS: dict[str, SequenceGroup] = {}
_numbers = count()


def make_sequence_group(
    process_group: dist.ProcessGroup,
    layout: Layout,
    transport: Transport,
    balances_documents: bool = False,
    stem: str | None = None,
) -> SequenceGroup:
    """Makes the group of a process group's ranks, and registers it under a new name until `release_group`.

    Every rank of the group passes the same arguments. Ranks that make the same groups in the same order give them the
    same names. Compiled graphs contain the name and torch's disk cache looks them up by it, so `stem`, its beginning,
    must determine all shapes of operators (default: the layout's).
    """
    stem = stem or _stem(layout)
    group = SequenceGroup(
        name=f"{stem}-{next(_numbers)}",
        process_group=process_group,
        rank=dist.get_rank(process_group),
        layout=layout,
        transport=transport,
        balances_documents=balances_documents,
    )
    _GROUPS[group.name] = group
    return group


def traced_group(layout: Layout) -> SequenceGroup:
    """Returns a group of one rank without a process group or transport, for tracing operators on fake tensors."""
    group = SequenceGroup(
        name=f"traced-{_stem(layout)}",
        process_group=None,  # type: ignore[arg-type]
        rank=0,
        layout=layout,
        transport=None,  # type: ignore[arg-type]
        balances_documents=False,
    )
    return _GROUPS.setdefault(group.name, group)


def find_group(name: str) -> SequenceGroup:
    """Returns the group with this name. Raises KeyError after `release_group`."""
    return _GROUPS[name]


def release_group(group: SequenceGroup) -> None:
    """Drops a group. The memory of its transport is freed with the last user; operators must not use the group."""
    _GROUPS.pop(group.name, None)
