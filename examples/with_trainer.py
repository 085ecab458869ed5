"""Trainer of transformers, with sequences split over all ranks; lightseq's lines are marked.

python3 examples/with_trainer.py
python3 -m torch.distributed.run --nproc_per_node=2 examples/with_trainer.py
"""

import tempfile

import torch
from torch.utils.data import DataLoader, RandomSampler
from train_loop import CONFIG
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

from lightseq import hf
from lightseq.distributed.mesh import World, init_distributed

LEARNING_RATE = 0.5
LENGTHS = (250, 40, 133, 250, 77, 250, 19, 201)  # of the documents: batches have different numbers of targets


def documents() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(CONFIG.vocab_size, (n,), generator=generator)} for n in LENGTHS]


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Returns the whole batch, padded on the right; padding is not a target."""
    ids = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True, padding_value=-100)
    return {"input_ids": ids.clamp_min(0), "labels": ids}


class SequenceTrainer(Trainer):
    """lightseq 1: every rank reads the same whole batches; Trainer's own loaders would give each rank its share."""

    def get_train_dataloader(self) -> DataLoader:
        order = RandomSampler(self.train_dataset, generator=torch.Generator().manual_seed(self.args.seed))
        return DataLoader(self.train_dataset, self.args.train_batch_size, sampler=order, collate_fn=self.data_collator)

    def get_eval_dataloader(self, eval_dataset=None) -> DataLoader:  # type: ignore[no-untyped-def]
        rows = eval_dataset if eval_dataset is not None else self.eval_dataset
        return DataLoader(rows, self.args.eval_batch_size, collate_fn=self.data_collator)


def train(world: World, output_dir: str, **changes: object) -> list[float]:
    """Returns the loss of every step, then that of an evaluation."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    arguments = TrainingArguments(
        output_dir,
        use_cpu=world.device.type == "cpu",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_train_epochs=3,
        optim="sgd",
        learning_rate=LEARNING_RATE,
        logging_steps=1,
        save_strategy="no",
        prediction_loss_only=True,
        ddp_find_unused_parameters=False,
        disable_tqdm=True,
        **changes,
    )
    context = hf.enable(model.to(world.device))  # lightseq 2: attention spans the ranks
    trainer = SequenceTrainer(
        model,
        arguments,
        data_collator=lambda rows: hf.shard_batch(context, **collate(rows)),  # lightseq 3: this rank's tokens
        train_dataset=documents(),
        eval_dataset=documents()[:2],
    )
    trainer.train()
    losses = [float(record["loss"]) for record in trainer.state.log_history if "loss" in record]
    return [*losses, trainer.evaluate()["eval_loss"]]


if __name__ == "__main__":
    with init_distributed(timeout_seconds=600) as world, tempfile.TemporaryDirectory() as folder:
        train(world, folder)
