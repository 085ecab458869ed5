"""TRL's DPOTrainer with a reference model, with sequences split over all ranks; lightseq's lines are marked.

python3 examples/dpo.py
python3 -m torch.distributed.run --nproc_per_node=2 examples/dpo.py
"""

import tempfile

import torch
from datasets import Dataset
from sft import CONFIG, TOKENIZER
from transformers import LlamaForCausalLM
from trl import DPOConfig

from lightseq.integrations import SequenceParallelDPOTrainer


def preferences(count: int) -> Dataset:
    """Returns prompts with a right and a wrong answer."""
    numbers = [(17 * i % 100, 31 * i % 100) for i in range(count)]
    rows = [{"prompt": f"{a} plus {b} is ", "chosen": f"{a + b}.", "rejected": f"{a - b}."} for a, b in numbers]
    return Dataset.from_list(rows)


def train(output_dir: str) -> list[float]:
    """Returns the loss of every step, then the evaluation loss."""
    torch.manual_seed(0)
    model, reference = LlamaForCausalLM(CONFIG), LlamaForCausalLM(CONFIG)
    reference.load_state_dict(model.state_dict())
    arguments = DPOConfig(
        output_dir,
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
        max_length=256,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
    )
    trainer = SequenceParallelDPOTrainer(  # lightseq 1: instead of DPOTrainer
        model,
        reference,
        arguments,
        train_dataset=preferences(32),
        eval_dataset=preferences(4),
        processing_class=TOKENIZER,
        sequence_parallel_size=None,  # lightseq 2: ranks that share a sequence; None is all of them
    )
    trainer.train()
    losses = [float(record["loss"]) for record in trainer.state.log_history if "loss" in record]
    return [*losses, trainer.evaluate()["eval_loss"]]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        train(folder)
