"""Trainer of transformers, with sequences split over all ranks; lightseq's lines are marked.

python3 examples/with_trainer.py
python3 -m torch.distributed.run --nproc_per_node=2 examples/with_trainer.py
"""

import tempfile

import torch
from torch import Tensor
from train_loop import CONFIG
from transformers import LlamaForCausalLM, TrainingArguments

from lightseq.integrations import SequenceParallelTrainer

LEARNING_RATE = 0.5
LENGTHS = (250, 40, 133, 250, 77, 250, 19, 201)  # of the documents: batches have different numbers of targets


def documents() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(CONFIG.vocab_size, (n,), generator=generator)} for n in LENGTHS]


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Returns the whole batch, padded on the right; padding is not a target."""
    ids = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True, padding_value=-100)
    return {"input_ids": ids.clamp_min(0), "labels": ids}


def train(output_dir: str) -> list[float]:
    """Returns the loss of every step, then the evaluation loss."""
    torch.manual_seed(0)
    arguments = TrainingArguments(
        output_dir,
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_train_epochs=3,
        optim="sgd",
        learning_rate=LEARNING_RATE,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
    )
    trainer = SequenceParallelTrainer(  # lightseq 1: instead of Trainer
        LlamaForCausalLM(CONFIG),
        arguments,
        data_collator=collate,
        train_dataset=documents(),
        eval_dataset=documents()[:2],
        sequence_parallel_size=None,  # lightseq 2: ranks that share a sequence; None is all of them
    )
    trainer.train()
    losses = [float(record["loss"]) for record in trainer.state.log_history if "loss" in record]
    return [*losses, trainer.evaluate()["eval_loss"]]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        train(folder)
