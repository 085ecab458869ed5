"""Choices that come with lightseq spare flash-linear-attention's autotuners their measurements."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.tune_recurrences import POPULAR
from lightseq.kernels.recurrent import tuned_choices
from lightseq.kernels.recurrent.tuned_choices import FILES, measured, take_tuned_choices

GPU = torch.device("cuda", 0)
ENTRIES = json.loads(Path(tuned_choices.__file__).with_name("hopper.json").read_text())


class Config:
    """Stand-in for triton.Config."""

    def __init__(self, kwargs: dict[str, int], num_warps: int, num_stages: int) -> None:
        self.kwargs, self.num_warps, self.num_stages = kwargs, num_warps, num_stages


def tuner(keys: list[str], inside: tuple[str, ...] = ()) -> Any:
    """Returns a stand-in for an autotuner around a heuristic that sets the arguments `inside`."""
    kernel = SimpleNamespace(values=dict.fromkeys(inside))
    return SimpleNamespace(keys=keys, configs=[Config({"BV": 32}, 1, 1)], cache={}, fn=kernel)


@pytest.fixture
def tuners(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    found = {
        "chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64": tuner(
            ["H", "HV", "K", "V", "BT", "BV", "USE_G", "STATE_V_FIRST"]
        ),
        "chunk_local_cumsum_scalar_kernel": tuner(["B", "H", "BT", "IS_VARLEN", "REVERSE"]),
        "chunk_fwd_kernel_o": tuner(["another", "key"]),
    }
    monkeypatch.setattr(tuned_choices, "autotuners", found.items)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    take_tuned_choices.cache_clear()
    return found


def test_choices_are_taken_for_any_number_of_heads(tuners: dict[str, Any]) -> None:
    take_tuned_choices(6, 12, GPU)
    state = tuners["chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64"].cache
    kept = {key[:6] for key in state}
    assert (6, 12, 128, 128, 64, True) in kept and all(key[:2] == (6, 12) for key in kept)
    chosen = next(config for key, config in state.items() if key[2:4] == (128, 128))
    assert chosen.kwargs == {"BV": 32} and chosen.num_warps == 4 and chosen.num_stages == 3
    sums = tuners["chunk_local_cumsum_scalar_kernel"].cache  # some kernels count heads of keys as H, others of values
    assert {key[1] for key in sums} == {6, 12}


def test_other_versions_of_a_kernel_and_other_gpus_are_tuned_anew(
    tuners: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    take_tuned_choices(6, 12, GPU)
    assert not tuners["chunk_fwd_kernel_o"].cache
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    for found in tuners.values():
        found.cache.clear()
    take_tuned_choices.cache_clear()
    take_tuned_choices(6, 12, GPU)
    assert not any(found.cache for found in tuners.values())


def test_a_choice_that_was_measured_here_stays(tuners: dict[str, Any]) -> None:
    take_tuned_choices(6, 12, GPU)
    state = tuners["chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64"].cache
    key = next(iter(state))
    state[key] = "measured"
    take_tuned_choices.cache_clear()
    take_tuned_choices(6, 12, GPU)
    assert state[key] == "measured"


def test_what_was_measured_can_be_taken_again(tuners: dict[str, Any]) -> None:
    take_tuned_choices(6, 12, GPU)
    of_file = [entry for entry in ENTRIES if entry["kernel"] in list(tuners)[:2]]
    found = {json.dumps(entry, sort_keys=True) for entry in measured()}
    assert found == {json.dumps(entry, sort_keys=True) for entry in of_file}
    state = tuners["chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64"].cache
    state[(6, 12, 128)] = next(iter(state.values()))
    with pytest.raises(ValueError, match="whose parts are not"):
        measured()


def test_the_file_has_the_heads_of_every_popular_hybrid() -> None:
    assert set(FILES.values()) == {"hopper.json"}
    sizes = {(entry["key"].get("K"), entry["key"].get("V")) for entry in ENTRIES}
    assert {(heads.keys, heads.values) for heads in POPULAR} <= sizes


@pytest.mark.gpu(1)
def test_popular_heads_need_no_measurement() -> None:
    pytest.importorskip("fla")
    from benchmarks.tune_recurrences import timed_pass

    take_tuned_choices.cache_clear()
    for heads in POPULAR:
        timed_pass(heads, 4096)
        known = {entry["kernel"] for entry in ENTRIES}
        for kernel, found in tuned_choices.autotuners():
            assert not hasattr(found, "bench_time") or kernel not in known, kernel
