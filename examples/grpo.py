"""TRL's GRPOTrainer with sequences split over all ranks, which generate the completions together; our lines are marked.

python3 examples/grpo.py
python3 -m torch.distributed.run --nproc_per_node=2 examples/grpo.py

With a vLLM server, set `use_vllm=True, vllm_mode="server"` as without lightseq; docs/rl.md says how to start it.
"""

import tempfile

import torch
from datasets import Dataset
from sft import CONFIG, TOKENIZER
from transformers import LlamaForCausalLM
from trl import GRPOConfig

from lightseq.integrations import SequenceParallelGRPOTrainer


def share_of_first_half(completion_ids: list[list[int]], **_: object) -> list[float]:
    """Rewards tokens from the first half of the vocabulary."""
    return [sum(token < len(TOKENIZER) // 2 for token in ids) / len(ids) for ids in completion_ids]


def train(output_dir: str) -> list[float]:
    """Returns the mean reward of every step."""
    torch.manual_seed(0)
    arguments = GRPOConfig(
        output_dir,
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
        per_device_train_batch_size=8,  # completions of a group of ranks
        num_generations=8,
        max_completion_length=32,
        max_steps=15,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
    )
    trainer = SequenceParallelGRPOTrainer(  # lightseq 1: instead of GRPOTrainer
        LlamaForCausalLM(CONFIG),
        args=arguments,
        reward_funcs=share_of_first_half,
        train_dataset=Dataset.from_list([{"prompt": f"{a} plus {a} is "} for a in range(64)]),
        processing_class=TOKENIZER,
        sequence_parallel_size=None,  # lightseq 2: ranks that share a sequence; None is all of them
    )
    trainer.train()
    rewards = [float(record["reward"]) for record in trainer.state.log_history if "reward" in record]
    trainer.accelerator.print(f"mean reward {rewards[0]:.2f} at first, {rewards[-1]:.2f} at last")
    return rewards


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        train(folder)
