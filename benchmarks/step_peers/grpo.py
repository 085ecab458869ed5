"""One rank of benchmarks/grpo.py: updates of TRL's GRPOTrainer, or of lightseq's subclass of it, on drawn completions.

Nothing is generated, so a step takes the time of the training part. `trl` has a completion per GPU and micro-batch, and
recomputes every layer; Liger replaces RoPE, RMSNorm and the gated MLP, and attention is FlashAttention-4 on GPUs.
`lightseq` splits as many completions as there are GPUs over all of them, compiles layers on GPUs, and recomputes
everything but attention.
Adapters train under DDP, whole models under FSDP2.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Instead of this folder, whose modules would hide packages.
    sys.path[0] = str(Path(__file__).resolve().parent.parent.parent)

import argparse
import itertools
import json
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import is_flash_attn_4_available
from trl import GRPOConfig, GRPOTrainer

from benchmarks.step_peers.peer import SEED, Job
from benchmarks.step_peers.sft import StepRecorder, fully_sharded, tokenizer_of, trainer_arguments
from lightseq.distributed.start import init_distributed
from lightseq.distributed.world import use_host_cores
from lightseq.models.decoder import text_config

KEY_TOKENS = 8  # the last tokens of a completion, which tell completions apart


class KeepsLogProbs:
    """Mixin that keeps the log-probabilities of the first update, of every completion by its last tokens."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.log_probs = dict[str, Tensor]()
        super().__init__(*args, **kwargs)

    def _get_per_token_logps_and_entropies(self, model: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = super()._get_per_token_logps_and_entropies(model, input_ids, *args, **kwargs)  # type: ignore[misc]
        if self.state.global_step == 0:  # type: ignore[attr-defined]
            for ids, log_probs in zip(input_ids, found[0].detach(), strict=True):
                self.log_probs[" ".join(map(str, ids[-KEY_TOKENS:].tolist()))] = log_probs.float().cpu()
        return found


class PlainGrpo(KeepsLogProbs, GRPOTrainer):
    pass


def trainer_class(implementation: str) -> type[GRPOTrainer]:
    if implementation == "trl":
        return PlainGrpo
    from lightseq.integrations import SequenceParallelGRPOTrainer

    class SplitGrpo(KeepsLogProbs, SequenceParallelGRPOTrainer):  # type: ignore[misc]
        pass

    return SplitGrpo


class Rollouts:
    """Completions of random tokens, others on each rank. All have one prompt, and `tokens` tokens."""

    def __init__(self, flags: argparse.Namespace, rank: int, vocabulary: int) -> None:
        self._prompt = draw_ids(0, flags.prompt, vocabulary)
        self._tokens, self._vocabulary = flags.completion, vocabulary
        self._seeds = itertools.count(1 + (rank << 16))

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        completions = [draw_ids(next(self._seeds), self._tokens, self._vocabulary) for _ in prompts]
        return {"prompt_ids": [self._prompt for _ in prompts], "completion_ids": completions, "logprobs": None}


def draw_ids(seed: int, tokens: int, vocabulary: int) -> list[int]:
    ids: list[int] = torch.randint(3, vocabulary, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [(ids[0] % 101) / 100 for ids in completion_ids]


def build(flags: argparse.Namespace, job: Job) -> PreTrainedModel:
    """Builds random weights, in float32 if they are trained and in the compute dtype beneath adapters."""
    torch.manual_seed(SEED)
    torch.set_default_dtype(job.dtype if flags.lora_rank else torch.float32)
    with job.world.device:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(job.config)
    torch.set_default_dtype(torch.float32)
    if flags.implementation == "trl" and job.on_gpu and is_flash_attn_4_available():
        model.set_attn_implementation("flash_attention_4")
    return model


def arguments_of(flags: argparse.Namespace, job: Job, folder: str) -> GRPOConfig:
    ranks = job.world.size
    splits, shards = flags.implementation == "lightseq", ranks > 1 and not flags.lora_rank
    rows = flags.rows * (ranks if splits else 1)  # of a micro-batch, which all ranks share or each has its own
    values = trainer_arguments(job, flags.updates, folder)
    del values["train_sampling_strategy"], values["dataloader_num_workers"]
    values |= {
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": flags.generations // (flags.rows * ranks),
        "num_generations": flags.generations,
        "max_completion_length": flags.completion,
        "gradient_checkpointing": not flags.keep_activations,
        "use_liger_kernel": not splits and job.on_gpu,
    }
    if ranks > 1:
        values["ddp_find_unused_parameters"] = False
    if shards:
        recomputed = not flags.keep_activations
        values |= fully_sharded(job, checkpoints=recomputed and not splits)
        values["gradient_checkpointing"] = recomputed and splits  # by FSDP for TRL
    return GRPOConfig(**values)


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="benchmarks/step_peers/grpo.py", allow_abbrev=False)
    out.add_argument("implementation", choices=("lightseq", "trl"))
    for name in ("model", "result"):
        out.add_argument(f"--{name}", type=Path, required=True)
    for name in ("prompt", "completion", "generations", "updates", "rows"):
        out.add_argument(f"--{name}", type=int, required=True)
    out.add_argument("--timeout", type=float, required=True)
    out.add_argument("--lora_rank", type=int)
    for name in ("eager", "keep_activations"):
        out.add_argument(f"--{name}", action="store_true")
    return out


def main(words: Sequence[str]) -> None:
    flags = parser().parse_args(words)
    with init_distributed(flags.timeout) as world, tempfile.TemporaryDirectory() as folder:
        use_host_cores(world)
        config = AutoConfig.from_pretrained(flags.model)
        vocabulary = text_config(config).vocab_size
        job = Job(config, flags.prompt + flags.completion, world)
        rank = flags.lora_rank
        adapters = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear") if rank else None
        recorder = StepRecorder(job)
        trainer = trainer_class(flags.implementation)(
            build(flags, job),
            args=arguments_of(flags, job, folder),
            reward_funcs=reward,
            train_dataset=Dataset.from_list([{"prompt": "a"}] * flags.generations * flags.updates),
            processing_class=tokenizer_of(vocabulary),
            rollout_func=Rollouts(flags, world.rank, vocabulary),
            callbacks=[recorder],
            peft_config=adapters,
            **({"compile_layers": False} if flags.eager else {}),
        )
        trainer.train()
        numbers = recorder.numbers()
        every: list[Any] = [None] * world.size
        dist.all_gather_object(every, trainer.log_probs)
        if world.is_main:
            flags.result.write_text(json.dumps(numbers, indent=2) + "\n")
            save_file({k: v for found in every for k, v in found.items()}, flags.result.with_suffix(".safetensors"))


if __name__ == "__main__":
    main(sys.argv[1:])
