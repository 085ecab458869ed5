"""View of an accelerator in which groups of ranks are processes."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from accelerate import Accelerator
from accelerate.utils import recursively_apply
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightseq.integrations.accelerate import DATA, SEQUENCE, objects_of_every, rows_of_every


class GroupAccelerator:
    """View of an accelerator in which the ranks that share sequences are one process.

    Values are gathered from the first rank of each group. Everything else is the accelerator's own.
    """

    def __init__(self, accelerator: Accelerator, mesh: DeviceMesh) -> None:
        self._accelerator = accelerator
        self.num_processes: int = mesh[DATA].size()
        self.process_index: int = mesh.get_local_rank(DATA)
        self._ranks = mesh[SEQUENCE].size()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    def gather(self, data: Any) -> Any:
        """Returns the rows of all groups, on every rank, of a tensor or of tensors in containers."""
        first_rows = partial(rows_of_every, self._ranks, self._accelerator.num_processes)
        return recursively_apply(first_rows, self._accelerator.gather(data))

    def reduce(self, tensor: Tensor, reduction: str = "mean", scale: float = 1.0) -> Tensor:
        """Returns the sum or the mean over groups, times `scale`."""
        groups = self.gather(tensor[None])
        return (groups.sum(0) if reduction == "sum" else groups.mean(0)) * scale

    def gather_object(self, rows: Sequence[Any]) -> list[Any]:
        """Returns the rows of all groups in one list, on every rank."""
        return objects_of_every(self._ranks, rows)


def own_accelerator(accelerator: Any) -> Accelerator:
    """Unwraps a view of groups."""
    return accelerator._accelerator if isinstance(accelerator, GroupAccelerator) else accelerator
