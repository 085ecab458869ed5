"""verl's SFT trainer on a tiny model, with each sequence split over two ranks. More words are settings of verl.

python3 -m torch.distributed.run --nproc_per_node=2 examples/verl/sft.py
python3 -m torch.distributed.run --nproc_per_node=2 examples/verl/sft.py model.lora_rank=4 optim.lr=1e-3
"""

import os
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

if not torch.cuda.is_available():  # before verl is imported
    os.environ |= {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "lightseq.integrations.verl_on_cpu"}

import hydra
import pandas
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from verl.trainer.sft_trainer import SFTTrainer
from verl.utils.distributed import initialize_global_process_group

WORDS, ROWS = 64, 64
CHAT = "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} <end> {% endfor %}"


def make_model(folder: Path) -> None:
    """Saves a model with random weights, its tokenizer, and chats that count upwards."""
    special = ("<pad>", "<end>", "<user>", "<assistant>")
    vocabulary = {word: n for n, word in enumerate([*special, *map(str, range(WORDS - len(special)))])}
    model = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    model.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model,
        pad_token="<pad>",
        eos_token="<end>",
        chat_template=CHAT,
        model_input_names=["input_ids", "attention_mask"],
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    chats = []
    for row in range(ROWS):
        numbers = [str((row + n) % 60) for n in range(10 + row % 40)]
        question, answer = {"role": "user", "content": " ".join(numbers[:3])}, " ".join(numbers[3:])
        chats.append({"messages": [question, {"role": "assistant", "content": answer}]})
    pandas.DataFrame(chats).to_parquet(folder / "chats.parquet")


def train(folder: Path) -> None:
    """Runs what `python3 -m verl.trainer.sft_trainer` runs."""
    lightseq = (
        "model.external_lib=lightseq.integrations.verl",  # registers the engine
        "engine._target_=lightseq.integrations.verl.LightseqEngineConfig",
        "engine.strategy=lightseq",
        f"engine.ulysses_sequence_parallel_size={min(2, dist.get_world_size())}",  # ranks that share a sequence
    )
    tiny = [
        *(f"model.path={folder}", f"data.train_files={folder}/chats.parquet", "data.num_workers=0"),
        *("data.train_batch_size=8", "data.max_token_len_per_gpu=128", "optim.lr=1e-2"),
        *("trainer.total_training_steps=8", "trainer.logger=[console]", "trainer.resume_mode=disable"),
        f"trainer.default_local_dir={folder}/checkpoints",
        f"trainer.device={'cuda' if torch.cuda.is_available() else 'cpu'}",
    ]
    if not torch.cuda.is_available():
        tiny += ["+engine.mixed_precision.param_dtype=fp32", "+engine.mixed_precision.reduce_dtype=fp32"]
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        config = hydra.compose("sft_trainer_engine", overrides=[*tiny, *lightseq, *sys.argv[1:]])
    SFTTrainer(config).fit()


def main() -> None:
    if torch.cuda.is_available():
        initialize_global_process_group()
    else:  # verl would name gloo twice
        dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders, src=0)
        if dist.get_rank() == 0:
            make_model(Path(own))
        dist.barrier()
        train(Path(folders[0]))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
