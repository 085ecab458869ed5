"""axolotl's runs with the plugin give the numbers of axolotl on one process, from the same YAML file."""

import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
from cases import slow_except
from worlds import spawn

try:
    version("axolotl")  # the name alone could also be a folder
except PackageNotFoundError:
    pytest.skip("needs axolotl (`make test-axolotl`)", allow_module_level=True)

from axolotl_numbers import ADAPTERS, PLUGIN, make_trainer, train, write_inputs, write_yaml
from trainer_numbers import assert_equal

CASES: Mapping[str, dict[str, Any]] = {
    "packed": {"sample_packing": True},
    "packed, adapters": {"sample_packing": True, **ADAPTERS, "gradient_checkpointing": True},
    "packed, accumulated": {"sample_packing": True, "gradient_accumulation_steps": 2, "micro_batch_size": 1},
    "packed, real batches": {"sample_packing": True, "multipack_real_batches": True},
    "padded": {},
    "flattened": {"batch_flattening": True},
    "dpo": {"rl": "dpo", "learning_rate": 0.02},
    "dpo, adapters": {"rl": "dpo", "learning_rate": 0.02, **ADAPTERS},
    "ipo": {"rl": "ipo", "learning_rate": 0.02},
}
QUICK = ("packed", "packed, adapters", "dpo")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("axolotl")
    write_inputs(made)
    return made


@pytest.mark.parametrize(("ranks", "size"), [(2, 2), pytest.param(4, 2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", slow_except(QUICK, CASES))
def test_runs_equal_one_process(folder: Path, case: str, ranks: int, size: int) -> None:
    groups = ranks // size
    changes = {**CASES[case], **({"micro_batch_size": 1} if groups > 1 else {})}
    ours = {**changes, "plugins": [PLUGIN], "lightseq_sequence_parallel_size": size}
    plain, split = (
        write_yaml(folder, f"{kind}-{case}-{ranks}", settings) for kind, settings in (("plain", changes), ("split", ours))
    )
    wanted = spawn(groups, train, plain)[0]
    for got in spawn(ranks, train, split):
        assert_equal(got, wanted)
