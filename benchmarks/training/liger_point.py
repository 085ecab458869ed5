"""A plan point (`plan_point.py`) whose Llama has kernels of Liger's: any of rope, rms_norm and swiglu, with commas.

python3 -m torch.distributed.run --standalone --nproc_per_node=1 benchmarks/training/liger_point.py rope,rms_norm \\
    RESULT 2 3 --model_name_or_path llama3.2-1b --bf16 --model_max_length 32768
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent.parent)  # and hides no package behind this folder

import importlib
from collections.abc import Sequence
from typing import Any

from benchmarks.training import plan_point

PARTS = ("rope", "rms_norm", "swiglu")


def main(words: Sequence[str]) -> None:
    parts, *others = words
    asked = parts.split(",")
    if unknown := set(asked) - set(PARTS):
        raise ValueError(f"{', '.join(sorted(unknown))}: of Liger's kernels give {', '.join(PARTS)}")
    plan_point.MeasuredTrainer = _with_kernels(asked)  # type: ignore[misc]
    plan_point.main(others)


def _with_kernels(parts: Sequence[str]) -> type[plan_point.MeasuredTrainer]:
    """Trains a model that has them. Not before: architectures are looked at on no device, where none of them runs.

    The loss stays ours: Liger's would keep its gradient in bfloat16.
    """
    liger = importlib.import_module("liger_kernel.transformers")

    class Trainer(plan_point.MeasuredTrainer):
        def __init__(self, *args: Any) -> None:
            asked = {part: part in parts for part in PARTS}
            liger.apply_liger_kernel_to_llama(**asked, cross_entropy=False, fused_linear_cross_entropy=False)
            super().__init__(*args)

    return Trainer


if __name__ == "__main__":
    main(sys.argv[1:])
