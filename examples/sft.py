"""TRL's SFTTrainer on packed documents, with sequences split over all ranks; lightseq's lines are marked.

python3 examples/sft.py
python3 -m torch.distributed.run --nproc_per_node=2 examples/sft.py
"""

import sys
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs uninstalled

from lightseq.integrations import SequenceParallelSFTTrainer


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer that needs no download: a token per byte."""
    tokens = ["<pad>", "<eos>", *sorted(ByteLevel.alphabet())]
    tokenizer = Tokenizer(BPE({token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


TOKENIZER = byte_tokenizer()
CONFIG = LlamaConfig(
    vocab_size=len(TOKENIZER), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
)


def sums(count: int) -> Dataset:
    """Returns prompts with completions, which alone are targets."""
    numbers = [(17 * i % 100, 31 * i % 100) for i in range(count)]
    return Dataset.from_list([{"prompt": f"{a} plus {b} is ", "completion": f"{a + b}."} for a, b in numbers])


def train(output_dir: str) -> list[float]:
    """Returns the loss of every step, then the evaluation loss."""
    torch.manual_seed(0)
    arguments = SFTConfig(
        output_dir,
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
        max_length=256,
        packing=True,
        per_device_train_batch_size=2,
        num_train_epochs=2,
        learning_rate=3e-3,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
    )
    trainer = SequenceParallelSFTTrainer(  # lightseq 1: instead of SFTTrainer
        LlamaForCausalLM(CONFIG),
        arguments,
        train_dataset=sums(100),
        eval_dataset=sums(10),
        processing_class=TOKENIZER,
        sequence_parallel_size=None,  # lightseq 2: ranks that share a sequence; None is all of them
    )
    trainer.train()
    losses = [float(record["loss"]) for record in trainer.state.log_history if "loss" in record]
    return [*losses, trainer.evaluate()["eval_loss"]]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        train(folder)
