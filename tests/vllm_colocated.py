"""One rank that trains with vLLM in its own process, on the CPU, and writes what it logs."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from test_integrations_vllm import FileClient, train
from trl.generation import vllm_generation
from vllm import LLM
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader import reload


class CountingLLM(LLM):  # type: ignore[misc]
    """vLLM in float32 that counts the completions of this process."""

    completions = 0

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "dtype": "float32", "enforce_eager": True})

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        found = super().generate(*args, **kwargs)
        CountingLLM.completions += sum(len(request.outputs) for request in found)
        return found


def reload_weights(generation: Any, sync: Callable[[Any], None]) -> None:
    """Sends weights to vLLM of this process as its server takes them: on CPUs vLLM lays out weights anew."""
    runner = generation.llm.llm_engine.model_executor.driver_worker.model_runner
    with set_current_vllm_config(runner.vllm_config):
        reload.initialize_layerwise_reload(runner.model)
        sync(generation)
        reload.finalize_layerwise_reload(runner.model, runner.model_config)


def train_colocated(folder: str) -> None:
    """Writes what is logged at every step, and the number of completions that this rank has generated."""
    vllm_generation.LLM, kind = CountingLLM, vllm_generation.VLLMGeneration
    sync = kind.sync_weights
    kind.sync_weights = lambda generation: reload_weights(generation, sync)
    rank = int(os.environ["RANK"])
    records = train(rank, folder, None, FileClient, False, 1.0)
    Path(folder, f"colocated-{rank}.json").write_text(json.dumps([records, CountingLLM.completions]))


if __name__ == "__main__":
    train_colocated(sys.argv[1])
