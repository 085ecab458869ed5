"""Flags that a resumed run changed since its checkpoint was saved."""

from pathlib import Path
from typing import Final

from lightseq.checkpoint.checkpoints import read_trainer_state
from lightseq.config.checks import EIGHT_BIT
from lightseq.config.train_config import TrainConfig

# What changes how a model learns, and neither the model nor its data.
LEARNING: Final = (
    *("optim", "learning_rate", "weight_decay", "max_grad_norm", "lr_scheduler_type", "warmup_ratio", "warmup_steps"),
    *("bf16", "fp16", "tf32", "fp8", "gradient_accumulation_steps", "per_device_train_batch_size"),
)
SAME_STATE: Final = ({"adamw_torch", "adamw_torch_fused"}, set(EIGHT_BIT))


def check_flags(resume_from: Path, config: TrainConfig) -> tuple[str, ...]:
    """Returns notes on changed flags. Raises ValueError if the optimizer cannot use the saved state."""
    then, now = read_trainer_state(resume_from).get("config"), config.to_json()
    if not isinstance(then, dict):
        return ()  # older checkpoints do not say
    changed = [name for name in LEARNING if name in then and then[name] != now[name]]
    both = {then.get("optim"), config.optim}
    if "optim" in changed and not config.deepspeed and not any(both <= alike for alike in SAME_STATE):
        raise ValueError(
            f"--resume_from_checkpoint {resume_from} has the state of --optim {then['optim']}, not of {config.optim}; "
            f"give --optim {then['optim']}, or begin anew from its weights with --model_name_or_path"
        )
    words = ", ".join(f"--{name} {now[name]} (was {then[name]})" for name in changed)
    return (f"resumed with {words}",) if words else ()
