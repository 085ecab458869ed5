"""verl's updates with sequences split over ranks give the numbers of verl's own FSDP2 engine."""

import os
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from worlds import spawn

if find_spec("verl") is None:
    pytest.skip("needs verl (`make test-verl`)", allow_module_level=True)

# Before verl is imported, here and in the processes that this file starts.
os.environ["VERL_PLATFORM"] = "cpu"
os.environ["VERL_USE_EXTERNAL_MODULES"] = "lightseq.integrations.verl_on_cpu"

from verl.utils import tensordict_utils as tu
from verl_numbers import Case, batch, loss_function, make_engine, nested, numbers, save_model, update, values_of_rows

CASES = {
    "sft": Case(),
    "ppo": Case("ppo", temperature=0.7),
    "sft, adapters": Case(lora_rank=4),
    "ppo, adapters": Case("ppo", lora_rank=4, checkpointing=True),
}


def _numbers_of_both(rank: int, folder: str, sequence_ranks: int) -> dict[str, tuple[Any, Any]]:
    return {
        name: (numbers(make_engine(folder, case, sequence_ranks), case), numbers(make_engine(folder, case, None), case))
        for name, case in CASES.items()
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = str(tmp_path_factory.mktemp("model"))
    save_model(made)
    return made


@pytest.mark.parametrize(
    ("ranks", "sequence_ranks"),
    [(2, 2), pytest.param(2, 1, marks=pytest.mark.slow), pytest.param(4, 2, marks=pytest.mark.slow)],
)
def test_updates_equal_those_of_verls_engine(folder: str, ranks: int, sequence_ranks: int) -> None:
    for both in spawn(ranks, _numbers_of_both, folder, sequence_ranks):
        for name, (got, wanted) in both.items():
            for ours, theirs in zip(got["updates"], wanted["updates"], strict=True):
                assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5), name
            assert got["rows"].keys() == wanted["rows"].keys()
            for row, values in wanted["rows"].items():
                np.testing.assert_allclose(got["rows"][row], values, rtol=1e-5, atol=1e-5, err_msg=f"{name}, row {row}")
            assert got["weights"].keys() == wanted["weights"].keys()
            for weight, values in wanted["weights"].items():
                np.testing.assert_allclose(got["weights"][weight], values, rtol=1e-5, atol=1e-5, err_msg=name)
