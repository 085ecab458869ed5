"""Runs of LLaMA-Factory and ms-swift on a tiny model, and what they log."""

import importlib
import json
import os
import sys
from collections.abc import Mapping
from importlib.metadata import distributions
from multiprocessing import current_process
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from trainer_numbers import documents, fresh_model, tokenizer
from transformers import TrainerCallback

# The names alone could also be folders.
INSTALLED = {"llamafactory", "ms-swift"} & {x.name.lower().replace("_", "-") for x in distributions()}
EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
# Not AdamW and no clipping: they would hide gradients of another scale.
COMMON: Mapping[str, Any] = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 1,
    "learning_rate": 0.5,
    "optim": "sgd",
    "lr_scheduler_type": "constant",
    "max_grad_norm": 1e9,
    "max_steps": 3,
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
    "use_cpu": True,
}
LLAMAFACTORY: Mapping[str, Any] = {
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "full",
    "dataset": "rows",
    "template": "empty",
    "cutoff_len": 80,
    "overwrite_cache": True,
    "bf16": False,
    "flash_attn": "sdpa",
}
MS_SWIFT: Mapping[str, Any] = {
    "model_type": "llama",
    "template": "dummy",
    "tuner_type": "full",
    "warmup_ratio": 0.0,
    "weight_decay": 0.0,
    "torch_dtype": "float32",
    "attn_impl": "sdpa",
    "split_dataset_ratio": 0.0,
    "dataloader_num_workers": 0,
    "dataset_num_proc": 1,
    "use_hf": True,
    "load_from_cache_file": False,
    "max_length": 100,
    "check_model": False,
}


def write_inputs(folder: Path) -> None:
    """Writes a model, its tokenizer and chats, in the form of each package, into a folder."""
    fresh_model().save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    pairs = []
    for ids in documents():
        words = [f"<{x}>" for x in ids]
        pairs.append((" ".join(words[: len(words) // 3]), " ".join(words[len(words) // 3 :])))
    rows = [{"instruction": prompt, "input": "", "output": answer} for prompt, answer in pairs]
    (folder / "rows.json").write_text(json.dumps(rows))
    (folder / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": "rows.json"}}))
    with (folder / "rows.jsonl").open("w") as file:
        for prompt, answer in pairs:
            chat = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": chat}) + "\n")


def train(rank: int, package: str, folder: Path, name: str, splits: bool, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Trains as the package's command does, with or without the example, and returns numbers of steps and weights."""
    os.environ.update(HF_HUB_OFFLINE="1", ACCELERATE_USE_CPU="true", DISABLE_VERSION_CHECK="1")
    run = {"llamafactory": _llamafactory, "ms-swift": _ms_swift}[package]
    history, model = run(folder, str(folder / name), splits, changes)
    steps = [(record["loss"], record["grad_norm"]) for record in history if "loss" in record]
    return {"steps": steps, "weights": {n: p.detach().numpy() for n, p in model.named_parameters() if p.requires_grad}}


class _KeepsModel(TrainerCallback):
    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.found = state.log_history, model


def import_llamafactory_example() -> Any:
    """Imports the example; LLaMA-Factory takes an older transformers, and torchaudio, whose wheel needs CUDA."""
    os.environ["DISABLE_VERSION_CHECK"] = "1"
    sys.modules.setdefault("torchaudio", ModuleType("torchaudio"))
    sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module("with_llamafactory")


def _llamafactory(folder: Path, output: str, splits: bool, changes: Mapping[str, Any]) -> tuple[Any, Any]:
    if splits:
        import_llamafactory_example()
    sys.modules.setdefault("torchaudio", ModuleType("torchaudio"))
    from llamafactory.train import tuner

    tuner.dist = SimpleNamespace(is_initialized=lambda: False)  # it would end the process group of the test
    keeper = _KeepsModel()
    inputs = {"model_name_or_path": str(folder / "model"), "dataset_dir": str(folder), "output_dir": output}
    tuner.run_exp({**COMMON, **LLAMAFACTORY, **inputs, **changes}, callbacks=[keeper])
    return keeper.found


def _ms_swift(folder: Path, output: str, splits: bool, changes: Mapping[str, Any]) -> tuple[Any, Any]:
    from swift.arguments import SftArguments
    from swift.pipelines import SwiftSft

    def pack_with_sdpa(self: Any) -> None:
        self.padding_free = self.padding_free or self.packing

    current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # packing starts processes
    SftArguments._check_padding_free = pack_with_sdpa  # it refuses all but flash-attention, which needs GPUs
    inputs = {"model": folder / "model", "dataset": folder / "rows.jsonl", "output_dir": output}
    plugin = {"external_plugins": EXAMPLES / "with_ms_swift.py"} if splits else {}
    settings = {**COMMON, **MS_SWIFT, **inputs, **plugin, **changes}
    run = SwiftSft([word for name, value in settings.items() for word in (f"--{name}", str(value))])
    return run.main()["log_history"], run.model
