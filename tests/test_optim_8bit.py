"""AdamW with states of 8 bits: it trains as AdamW does, in a quarter of the memory, and goes on where it stopped."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import Ended, program
from small import HIDDEN, INTERMEDIATE, VOCABULARY, losses, words, write_inputs
from torch import Tensor
from torch.distributed.tensor import DTensor
from worlds import spawn

from lightseq import engine, optimization
from lightseq.optimization import check_optimizer

pytest.importorskip("torchao")
# States of fewer than 4096 values on a rank stay as they are.
LAYER = HIDDEN * (HIDDEN + 2 * HIDDEN // 2 + HIDDEN) + 3 * HIDDEN * INTERMEDIATE
QUANTIZED = 2 * VOCABULARY * HIDDEN + LAYER
NORMS = 3 * HIDDEN


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("8bit"))


def run(rank: int, runs: list[str], stance: str) -> tuple[list[Ended], int]:
    """Programs one after the other; the bytes of this rank's optimizer states in the last one."""
    torch.compiler.set_stance(stance)
    optimizers: list[torch.optim.Optimizer] = []
    make = engine.make_optimizer

    def remember(*args: Any) -> torch.optim.Optimizer:
        optimizers.append(make(*args))
        return optimizers[-1]

    engine.make_optimizer = remember  # type: ignore[assignment]
    ends = [program(rank, "llama3", line) for line in runs]
    states = (value for state in optimizers[-1].state.values() for value in state.values())
    return ends, sum(x.numel() * x.element_size() for x in plain(states) if x.ndim)


def plain(states: Iterable[Tensor]) -> Iterable[Tensor]:
    """This rank's memory behind some states; the table of 256 values that a quantized one carries is left out."""
    for state in states:
        local = state.to_local() if isinstance(state, DTensor) else state
        yield from (local.codes, local.scale) if hasattr(local, "codes") else (local,)


def test_losses_are_those_of_adamw_and_states_take_a_byte(files: Path) -> None:
    more = "--max_steps 20 --save_strategy no"
    wide, _ = zip(*spawn(2, run, [words(files, "wide", more)], "default"), strict=True)
    narrow, states = zip(
        *spawn(2, run, [words(files, "narrow", f"{more} --optim adamw_8bit")], "force_eager"), strict=True
    )
    assert [end.status for ends in (*wide, *narrow) for end in ends] == [0] * 4, narrow[0][0].err
    expected, got = losses(files, "wide"), losses(files, "narrow")
    assert min(expected) < expected[0] - 1
    assert got == pytest.approx(expected, rel=0.05) and got != expected
    assert sum(states) == 2 * (QUANTIZED * (1 + 4 / 256) + 4 * NORMS)


def test_a_resumed_run_equals_one_that_never_stopped(files: Path) -> None:
    optim = "--optim adamw_torch_8bit"
    whole = words(files, "whole", f"{optim} --max_steps 4 --save_steps 2")
    resumed = f"{whole} --output_dir {files}/resumed --resume_from_checkpoint {files}/whole/checkpoint-2"
    by_rank = spawn(2, run, [whole, resumed], "force_eager")
    assert [end.status for ends, _ in by_rank for end in ends] == [0] * 4, by_rank[0][0][-1].err
    assert losses(files, "resumed") == losses(files, "whole")[2:]  # to the bit


def test_states_go_to_other_numbers_of_ranks_unless_a_block_would_be_cut(files: Path) -> None:
    saved = words(files, "saved", "--optim adamw_8bit --max_steps 2 --save_steps 1")
    assert [end.status for ends, _ in spawn(2, run, [saved], "force_eager") for end in ends] == [0, 0]
    resumed = f"{saved} --resume_from_checkpoint {files}/saved/checkpoint-1 --output_dir {files}"
    assert [end.status for end in spawn(1, run, [f"{resumed}/alone"], "force_eager")[0][0]] == [0]
    assert losses(files, "alone") == pytest.approx(losses(files, "saved")[1:], rel=1e-5)
    ends = [end for ends, _ in spawn(3, run, [f"{resumed}/three"], "force_eager") for end in ends]
    said = "".join(end.err for end in ends)
    assert [end.status for end in ends] == [2] * 3 and said.count("\n") == 1
    assert "whose blocks 3 ranks would cut apart; resume on as many ranks as it was saved on" in said


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    check_optimizer("adamw_8bit", cpu)
    monkeypatch.setattr(optimization, "_missing_compiler", lambda device: "C++ compiler")
    with pytest.raises(ValueError, match=r"^--optim adamw_8bit compiles .* no C\+\+ compiler; .* adamw_torch_fused$"):
        check_optimizer("adamw_8bit", cpu)
    monkeypatch.setattr(optimization, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"^--optim adamw_8bit is torchao's, .*; pip install torchao$"):
        check_optimizer("adamw_8bit", cpu)
    check_optimizer("adamw_torch_fused", cpu)
