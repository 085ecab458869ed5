"""Model card of a checkpoint: the README.md that the hub shows."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from huggingface_hub import ModelCardData

from lightseq.config.train_config import TrainConfig
from lightseq.data.sources import HUB_PREFIX
from lightseq.distributed.environment import secrets
from lightseq.training.machine import hardware, versions
from lightseq.training.trainer import Trainer
from lightseq.utils.masking import mask_secrets

PACKAGES: Final = ("torch", "transformers")  # whose versions a card names
PLACES: Final = ("output_dir", "data_cache", "resume_from_checkpoint", "overwrite_output_dir")  # flags without effect


def model_card(trainer: Trainer, step: int, losses: Sequence[float], eval_loss: float | None) -> str:
    """Returns the card of the checkpoint after a step: data, length, losses, hardware and flags.

    `losses` are those logged so far in this run.
    """
    config, stream = trainer.config, trainer.inputs.stream
    found = hardware(trainer.world.device)["device"]
    rows = {
        "step": f"{step:,} of {trainer.inputs.total_steps:,}",
        "data": f"`{_public(config.data_path)}`",
        "sequence": f"{config.model_max_length:,} tokens, {stream.sequences_per_step} a step",
        "training loss": f"{losses[-1]:.4f}" if losses else None,
        "evaluation loss": f"{eval_loss:.4f}" if eval_loss is not None else None,
        "hardware": f"{trainer.world.size} x {found}, each sequence over {trainer.inputs.dims.sequence}",
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items() if name in PACKAGES),
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items() if value is not None)
    made = "An adapter (LoRA) of" if trainer.inputs.lora is not None else "Fine-tuned from"
    if config.random_init:
        made = "Trained from random weights of"
    card = f"""---
{_metadata(trainer).to_yaml()}
---
# {Path(config.output_dir).name}, step {step:,}

{made} `{_public(config.model_name_or_path)}`, with lightseq.

| | |
|---|---|
{table}

```
lightseq train {_flags(trainer)}
```
"""
    return str(mask_secrets(card, secrets()))


def _metadata(trainer: Trainer) -> ModelCardData:
    config, adapts = trainer.config, trainer.inputs.lora is not None
    base, data = config.model_name_or_path, config.data_path
    on_hub = not config.random_init and not os.path.exists(base)
    return ModelCardData(
        base_model=base if on_hub else None,
        datasets=[data.removeprefix(HUB_PREFIX).split(":")[0]] if data.startswith(HUB_PREFIX) else None,
        library_name="peft" if adapts else "transformers",
        pipeline_tag="text-generation",
        tags=["lightseq", *["lora"] * adapts],
    )


def _flags(trainer: Trainer) -> str:
    """Returns the flags that differ from the defaults, as on a command line."""
    config = trainer.config
    defaults: dict[str, Any] = TrainConfig(model_name_or_path="", data_path="", output_dir="").to_json()
    given = {name: value for name, value in config.to_json().items() if name not in PLACES}
    changed = {name: value for name, value in given.items() if value is not None and value != defaults[name]}
    return " ".join(f"--{name} {_word(value)}" for name, value in changed.items())


def _word(value: Any) -> str:
    return ":".join(map(str, value)) if isinstance(value, list) else shlex.quote(_public(str(value)))


def _public(value: str) -> str:
    """Removes the folder from a local path, to keep it private. Returns other values unchanged."""
    return Path(value).name if os.path.exists(value) else value
