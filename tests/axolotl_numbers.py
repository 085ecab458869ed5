"""Runs of axolotl on a tiny model, as its command makes them from a YAML file, and what they log."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from trainer_numbers import Numbers, documents, fresh_model, numbers, tokenizer

PLUGIN = "lightseq.integrations.axolotl.LightseqPlugin"
LENGTH = 64
COMMON: Mapping[str, Any] = {
    "sequence_len": LENGTH,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 1,
    "num_epochs": 3,
    "max_steps": 3,
    # Not AdamW and no clipping: they would hide gradients of another scale.
    "optimizer": "sgd",
    "learning_rate": 0.5,
    "lr_scheduler": "constant",
    "max_grad_norm": 0.0,
    "bf16": False,
    "tf32": False,
    "attn_implementation": "sdpa",
    "logging_steps": 1,
    "save_strategy": "no",
    "eval_steps": 3,
    "val_set_size": 0,
    "dataset_num_proc": 1,
    "dataloader_num_workers": 0,  # tests run in daemons, which have no children
    "dataloader_prefetch_factor": None,
    "dataloader_pin_memory": False,
    "seed": 5,
}
ADAPTERS: Mapping[str, Any] = {
    "adapter": "lora",
    "lora_r": 4,
    "lora_alpha": 8,
    "lora_target_modules": ["q_proj", "v_proj", "down_proj"],
    **dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel"), False),
}
UNTIMED = ("memory/", "per_sec", "runtime", "epoch")


def text(ids: list[int]) -> str:
    return " ".join(f"<{x}>" for x in ids)


def write_inputs(folder: Path) -> None:
    """Writes a model, its tokenizer, texts and preferences into a folder."""
    fresh_model().save_pretrained(folder / "model")
    tokens = tokenizer()
    tokens.save_pretrained(folder / "model")
    texts = [{"text": text(ids)} for ids in documents()]
    pairs = []
    for ids in documents():
        half = len(ids) // 2
        rejected = [*ids[half // 2 : 2 * half], 5, 7]
        pairs.append({"prompt": text(ids[:half]), "chosen": text(ids[half:]), "rejected": text(rejected)})
    for name, rows in (("texts", texts), ("held_out", texts[:5]), ("pairs", pairs), ("held_out_pairs", pairs[:5])):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def write_yaml(folder: Path, name: str, changes: Mapping[str, Any]) -> str:
    """Writes the configuration of a run, and returns its path. `rl` chooses the rows."""
    if changes.get("rl"):
        kinds = {"train": "pairs", "held_out": "held_out_pairs"}
        columns = {"field_prompt": "prompt", "field_chosen": "chosen", "field_rejected": "rejected"}
        form: dict[str, Any] = {"type": {**columns, "prompt_format": "{prompt}", "chosen_format": " {chosen}"}}
        form["type"]["rejected_format"] = " {rejected}"
    else:
        kinds, form = {"train": "texts", "held_out": "held_out"}, {"type": "completion", "field": "text"}
    datasets = {
        key: [{"path": str(folder / f"{rows}.jsonl"), "ds_type": "json", "split": "train", **form}]
        for key, rows in kinds.items()
    }
    config = {
        "base_model": str(folder / "model"),
        "output_dir": str(folder / name),
        "dataset_prepared_path": str(folder / f"{name}-prepared"),
        "datasets": datasets["train"],
        "test_datasets": datasets["held_out"],
        **COMMON,
        **changes,
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    return str(path)


def train(rank: int, path: str) -> Numbers:
    """Trains as `axolotl train` does, and returns what is logged and the weights."""
    trainer = make_trainer(path)
    found = numbers(trainer)
    for record in found["history"]:
        for name in [name for name in record if any(word in name for word in UNTIMED)]:
            del record[name]
    return found


def train_with_own_ring(rank: int, path: str) -> Numbers:
    """Trains as `axolotl train` does with its own ring attention, whose kernel is replaced by plain torch."""
    import flash_attention_2
    import torch
    from accelerate.parallelism_config import ParallelismConfig

    flash_attention_2.install()
    # What axolotl does on GPUs alone.
    os.environ["ACCELERATE_ALLOW_CP_STANDALONE"] = "true"
    make_mesh = ParallelismConfig.build_device_mesh
    ParallelismConfig.build_device_mesh = lambda self, _: make_mesh(self, "cpu")
    torch.cuda.current_device = lambda: torch.device("cpu")
    from axolotl.utils.ctx_managers import SequenceParallelContextManager
    from axolotl.utils.schemas.enums import RingAttnFunc

    trainer, packs = make_trainer(path), yaml.safe_load(Path(path).read_text()).get("sample_packing")
    around = SequenceParallelContextManager(
        models=[trainer.model],
        context_parallel_size=2,
        gradient_accumulation_steps=1,
        ring_attn_func=RingAttnFunc.VARLEN_LLAMA3 if packs else RingAttnFunc.BATCH_RING,
        heads_k_stride=1,
        gather_outputs=False,
        device_mesh=trainer.accelerator.torch_device_mesh,
    )
    with around:
        return numbers(trainer)


def make_trainer(path: str) -> Any:
    os.environ.update(AXOLOTL_DO_NOT_TRACK="1", HF_HUB_OFFLINE="1", WANDB_MODE="disabled", ACCELERATE_USE_CPU="true")
    from axolotl.cli.config import load_cfg
    from axolotl.common.datasets import load_datasets, load_preference_datasets
    from axolotl.integrations.base import PluginManager

    config = load_cfg(path)
    config.device_map = {"": "cpu"}  # axolotl gives each of several ranks a GPU
    PluginManager.get_instance().load_datasets(config, preprocess=False)
    load = load_preference_datasets if config.rl else load_datasets
    rows = load(cfg=config, cli_args=None)
    from axolotl.train import setup_model_and_trainer

    return setup_model_and_trainer(config, rows)[0]
