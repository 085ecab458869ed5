"""Weights of a trainer for a vLLM server on the CPU, through a file instead of NCCL. The server imports this file.

vLLM registers engines for weight transfer by name. `--worker-extension-cls vllm_weights.FileTransfer` registers this
one in its workers, and `--weight-transfer-config '{"backend": "file"}'` chooses it.
"""

from dataclasses import dataclass

import torch
from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine


@dataclass
class FileInit(WeightTransferInitInfo):
    pass


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    path: str


class FileTransferEngine(NCCLWeightTransferEngine):
    """vLLM's engine for weights in a checkpoint's names, which reads them from a file."""

    init_info_cls = FileInit  # type: ignore[assignment]
    update_info_cls = FileUpdate  # type: ignore[assignment]

    def init_transfer_engine(self, init_info: FileInit) -> None:  # type: ignore[override]
        pass

    def update_weights(self, update_info: dict[str, str]) -> None:
        self.receive_weights(self.parse_update_info(update_info))  # type: ignore[arg-type]

    def receive_weights(self, update_info: FileUpdate) -> None:  # type: ignore[override]
        weights: dict[str, torch.Tensor] = load_file(update_info.path)
        self.model.load_weights(weights.items())


class FileTransfer:
    """Empty extension of vLLM's workers, which import this file for its sake."""


WeightTransferEngineFactory.register_engine("file", FileTransferEngine)
