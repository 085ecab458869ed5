"""Local parts of distributed tensors."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def local_part(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a tensor, sharing its memory; a plain tensor is returned as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
