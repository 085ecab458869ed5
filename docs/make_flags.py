"""Prints docs/flags.md from the dataclasses of flags and the registries: python3 docs/make_flags.py > docs/flags.md"""

import dataclasses
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lightseq.config.choices import CHOICES
from lightseq.config.command_line import REQUIRED
from lightseq.config.flags import GROUPS
from lightseq.kernels.attention.registry import KERNELS
from lightseq.schedule.algorithms import SCHEDULES, make_schedule
from lightseq.schedule.cost import AttentionShape, cost

RANKS = 8
SHAPE = AttentionShape(length=2**17, heads=32, kv_heads=8, head_dim=128)

# What a user of another program sets: our flag, its names in Trainer and TRL, axolotl, torchtitan, and what differs.
# Programs that use our name are left out.
NAMES = (
    ("--model_name_or_path", "", "base_model", "hf_assets_path initial_load_path", ""),
    ("--data_path", "dataset_name", "datasets", "dataset dataset_path", "several: `a.jsonl=2,b.jsonl=0.5`"),
    ("--output_dir", "", "", "dump_folder", ""),
    ("--model_max_length", "max_length", "sequence_len", "seq_len", "tokens over all ranks of a sequence"),
    ("--packing best_fit", "packing", "sample_packing", "", ""),
    ("--sequence_parallel_size", "cp_size sp_size", "context_parallel_size", "context_parallel_degree",
     "default: all ranks"),
    ("--expert_parallel_size", "", "", "expert_parallel_degree", "chosen by the plan"),
    ("--per_device_train_batch_size", "", "micro_batch_size", "local_batch_size", "counts a group of ranks once"),
    ("--num_train_epochs", "", "num_epochs", "", ""),
    ("--max_steps", "", "", "steps", ""),
    ("--learning_rate", "", "", "lr", ""),
    ("--lr_scheduler_type", "", "lr_scheduler", "", ""),
    ("--optim", "", "optimizer", "", ""),
    ("--max_grad_norm", "", "", "max_norm", ""),
    ("--kernel", "attn_implementation", "flash_attention", "", "chosen"),
    ("--remat", "gradient_checkpointing_kwargs", "gradient_checkpointing_kwargs", "", "chosen by the plan"),
    ("--offload", "", "activation_offloading", "", "chosen by the plan"),
    ("--fsdp", "fsdp_config", "fsdp_config fsdp_version", "", "FSDP2 over all ranks is the default"),
    ("--lora_rank", "lora_r use_peft", "lora_r", "", ""),
    ("--load_in_4bit", "quantization_config", "qlora", "", "NF4; needs `--lora_rank`"),
    ("--eval_fraction", "", "val_set_size", "", ""),
    ("--data_cache", "", "dataset_prepared_path", "", ""),
    ("--keep_best", "load_best_model_at_end", "load_best_model_at_end", "", ""),
    ("--save_total_limit", "", "", "keep_latest_k", ""),
    ("--logging_steps", "", "", "log_freq", ""),
    ("--step_timeout", "ddp_timeout", "ddp_timeout", "", ""),
    ("--report_to", "", "use_wandb", "", ""),
    ("", "completion_only_loss assistant_only_loss", "train_on_inputs roles_to_train", "",
     "[columns](data.md#columns) decide"),
    ("", "use_liger_kernel", "cut_cross_entropy", "", "logits never exist whole"),
    ("", "", "tensor_parallel_size", "tensor_parallel_degree pipeline_parallel_degree", "no such split"),
)  # fmt: skip

PAGE = """\
<!-- Made by docs/make_flags.py. Change the help texts in lightseq/config/flags.py, or this text there. -->
# Flags

Look up a training flag and its default (in parentheses), a schedule or a kernel. `python3 llama3/train.py --help`
prints the flags; `lightseq train`, `verify`, `plan` and `evaluate` take them too. `train`, `verify` and `evaluate` also
take `--nproc_per_node` and `--max_restarts` ([launching](launching.md#one-host)), also in a file. Names follow the
Hugging Face `Trainer`. `--bf16` alone means `--bf16 True`.

## Flags in a file
`--config FILE` reads flags from a YAML or JSON file, or a [recipe](recipes.md) by its name. Flags on the command line
win over the file.

```yaml
# run.yaml
model_name_or_path: meta-llama/Llama-3.2-1B
output_dir: outputs/books
data:                       # optional: flags may be grouped
  data_path: data/books
  model_max_length: 128K
training:
  learning_rate: 2e-5
  max_steps: 1000
  bf16: true
model:
  rope_scaling: {{rope_type: yarn, factor: 8}}
logging:
  save_strategy: no         # read as the word no, as on the command line
```
```
lightseq train --config run.yaml --learning_rate 1e-5
```

A value is the text that would follow the flag: `no`, `10:12`, `128K` and `2e-5` need no quotes. `rope_scaling` and
`lr_scheduler_kwargs` may be mappings, and `profile_steps` a list of two steps. `null`, or no value, leaves a flag
without a default unset. `verify` takes `--data_path` and `--output_dir` from the command line only.

The file may also be the `run.json` of an earlier run, to continue or repeat it:
```
lightseq train --config outputs/books/run.json \\
    --output_dir outputs/again
```
{groups}

## Schedules
A schedule decides which rank computes which tile of attention at which step. *Busy* is the share of the time that a
rank computes, averaged over {ranks} ranks. This command validates a schedule and draws it:
```
lightseq schedule --schedule balanced --ranks {ranks}
```

{schedules}

`--ulysses_size` splits heads over that many ranks under any other schedule. `prefix` takes any number of heads;
`ulysses` needs query heads divisible by the number of ranks, and key/value heads that are a multiple or a divisor of
it. The same holds for `--ulysses_size`.

## Transports
`symmetric` lets the GPUs of a host read each other's memory; it needs peer access, as over NVLink. `nccl` works between
all GPUs, `gloo` between CPUs. On GPUs `auto` takes `symmetric` inside a host where it can, and `nccl` elsewhere. The
run prints which: `symmetric+nccl` if it takes both.

## Kernels
A kernel computes one tile. `run.json` names the kernel that `auto` chose, and why faster ones could not run.

{kernels}

## Names of other programs
What replaces settings of other programs. Those that have the same name are left out, as most of `Trainer`'s are. An
unknown flag's error says what to give instead, for many more names than these.

{names}
"""


def table(header: Sequence[str], rows: Iterator[Sequence[str]]) -> str:
    """Returns a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |" for cells in lines)


def note(field: dataclasses.Field[Any]) -> str:
    """Returns the default of a flag; nothing where its help says what happens without it."""
    if field.name in REQUIRED:
        return " (required)"
    default = field.metadata.get("default", field.default)
    return "" if default is None else f" (`{default}`)"


def meaning(field: dataclasses.Field[Any]) -> str:
    """Returns the help of a flag, with its choices unless the help explains them or a table below lists them."""
    text = str(field.metadata["help"])
    choices = () if field.name in ("schedule", "kernel") else CHOICES.get(field.name, ())
    if all(re.search(rf"(?<![\w+]){re.escape(name)}(?![\w+])", text) for name in choices):
        return text
    return f"{text} Choices: {', '.join(f'`{name}`' for name in choices)}."


def groups() -> Iterator[str]:
    """Yields a heading and a list for each group of flags."""
    for title, group in GROUPS.items():
        rows = [f"- `--{field.name}`{note(field)}: {meaning(field)}" for field in dataclasses.fields(group)]
        yield "\n".join([f"\n## {title.capitalize()}", *rows])


def schedules() -> Iterator[Sequence[str]]:
    """Yields a row for each schedule."""
    for name, algorithm in SCHEDULES.items():
        busy = cost(make_schedule(name, RANKS), SHAPE).busy
        yield f"`{name}`", algorithm.description, algorithm.source, f"{100 * busy:.0f}%"
    yield "`auto`", "The fastest by the time model, for the heads, length and hosts at hand.", "", ""


def kernels() -> Iterator[Sequence[str]]:
    """Yields a row for each kernel."""
    for name, kernel in KERNELS.items():
        yield f"`{name}`", kernel.description + ".", kernel.runs_on
    yield "`auto`", "The fastest for the chip among those that can run.", "everywhere"


def names() -> Iterator[Sequence[str]]:
    """Yields a row for each setting of other programs."""
    for flag, *others, note_ in NAMES:
        ours = f"`{flag}`" if flag else "–"
        yield ours, *(", ".join(f"`{name}`" for name in each.split()) for each in others), note_


def page() -> str:
    """Returns the text of docs/flags.md."""
    return PAGE.format_map(
        {
            "groups": "\n".join(groups()),
            "ranks": RANKS,
            "schedules": table(("`--schedule`", "who computes what", "source", "busy"), schedules()),
            "names": table(("lightseq", "`Trainer`, TRL", "axolotl", "torchtitan", "to know"), names()),
            "kernels": table(("`--kernel`", "implementation", "runs on"), kernels()),
        }
    )


if __name__ == "__main__":
    print(page(), end="")
