"""LLaMA-Factory and ms-swift with the examples give the numbers of the packages on one process."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from other_numbers import INSTALLED, import_llamafactory_example, train, write_inputs
from worlds import spawn

if not INSTALLED:
    pytest.skip("needs LLaMA-Factory or ms-swift (`make test-other-trainers`)", allow_module_level=True)

PACKED = {"per_device_train_batch_size": 1, "packing": True}
CASES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llamafactory, padded": ("llamafactory", {}),
    "llamafactory, accumulated": ("llamafactory", {"gradient_accumulation_steps": 2}),
    "llamafactory, packed": ("llamafactory", {**PACKED, "neat_packing": True, "cutoff_len": 96}),
    "llamafactory, adapters": (
        "llamafactory",
        {"finetuning_type": "lora", "lora_rank": 4, "lora_target": "q_proj,v_proj,down_proj"},
    ),
    "llamafactory, pre-training": ("llamafactory", {"stage": "pt", "cutoff_len": 64}),
    "ms-swift, padded": ("ms-swift", {}),
    "ms-swift, accumulated": ("ms-swift", {"gradient_accumulation_steps": 2}),
    "ms-swift, packed": ("ms-swift", {**PACKED, "packing_length": 128}),
}


@pytest.mark.parametrize("case", [name for name, (package, _) in CASES.items() if package in INSTALLED])
def test_runs_equal_one_process(tmp_path: Path, case: str) -> None:
    package, changes = CASES[case]
    write_inputs(tmp_path)
    (wanted,) = spawn(1, train, package, tmp_path, "plain", False, changes)
    assert len(wanted["steps"]) == 3
    for got in spawn(2, train, package, tmp_path, "split", True, changes):
        assert np.allclose(got["steps"], wanted["steps"], rtol=1e-5, atol=1e-5)
        for name, weight in wanted["weights"].items():
            assert np.linalg.norm(got["weights"][name] - weight) <= 1e-5 * np.linalg.norm(weight), name


@pytest.mark.skipif("llamafactory" not in INSTALLED, reason="needs LLaMA-Factory")
def test_stages_that_do_not_split_sequences_are_refused() -> None:
    tuner = import_llamafactory_example().tuner
    with pytest.raises(ValueError, match=r"^stage: dpo does not split sequences; use sft or pt, or "):
        tuner.run_dpo(None, None)
