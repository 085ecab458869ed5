"""AdamW with states of 8 bits: it trains as AdamW does, in a quarter of the memory, and goes on where it stopped."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import Ended, program
from small import HIDDEN, INTERMEDIATE, VOCABULARY, losses, words, write_inputs
from test_optimization import updated
from torch import Tensor
from torch.distributed.tensor import DTensor
from worlds import spawn

from lightseq.config.train_config import TrainConfig
from lightseq.memory.host_adamw import compute_updates_on
from lightseq.training import fsdp_engine, optimization

pytest.importorskip("torchao")
# States of fewer than 4096 values on a rank stay as they are.
LAYER = HIDDEN * (HIDDEN + 2 * HIDDEN // 2 + HIDDEN) + 3 * HIDDEN * INTERMEDIATE
QUANTIZED = 2 * VOCABULARY * HIDDEN + LAYER
NORMS = 3 * HIDDEN


STEPS, HALF = 16, 8


def run(rank: int, runs: list[str], in_pieces: str = "none") -> tuple[list[Ended], int]:
    """Programs one after the other; the bytes of this rank's optimizer states in the last one.

    Those whose words say `in_pieces` update as what waits on the host does beside a GPU.
    """
    torch.compiler.set_stance("force_eager")  # what would be compiled is the same arithmetic, and compiling takes long
    optimizers: list[torch.optim.Optimizer] = []
    make = fsdp_engine.make_optimizer

    def remember(*args: Any) -> torch.optim.Optimizer:
        optimizers.append(make(*args))
        if args[1].output_dir.endswith(in_pieces):
            compute_updates_on(torch.device("cpu"), optimizers[-1], piece=2048)
        return optimizers[-1]

    fsdp_engine.make_optimizer = remember  # type: ignore[assignment]
    ends = [program(rank, "llama3", line) for line in runs]
    tag = f"rank {rank} of {torch.distributed.get_world_size()}"
    assert torch.compiler.config.cache_key_tag.endswith(tag), (
        "ranks whose parts differ would share what is compiled for one"
    )
    states = (value for state in optimizers[-1].state.values() for value in state.values())
    return ends, sum(x.numel() * x.element_size() for x in plain(states) if x.ndim)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs on two ranks: AdamW with states of 32 and of 8 bits, and the latter resumed halfway."""
    folder = write_inputs(tmp_path_factory.mktemp("8bit"))
    flags = f"--max_steps {STEPS} --save_steps {HALF}"
    runs = [
        words(folder, "wide", flags),
        words(folder, "narrow", f"{flags} --optim adamw_8bit"),
        words(folder, "resumed", f"{flags} --optim adamw_torch_8bit {resume(folder)}"),
        words(folder, "pieces", f"{flags} --optim adamw_8bit {resume(folder)}"),
    ]
    ends, states = zip(*spawn(2, run, runs, "pieces"), strict=True)
    assert [end.status for rank_ends in ends for end in rank_ends] == [0] * 8, ends[0][-1].err
    (folder / "states").write_text(str(sum(states)))
    return folder


def resume(files: Path) -> str:
    return f"--resume_from_checkpoint {files}/narrow/checkpoint-{HALF}"


def plain(states: Iterable[Tensor]) -> Iterable[Tensor]:
    """This rank's memory behind some states; the table of 256 values that a quantized one carries is left out."""
    for state in states:
        local = state.to_local() if isinstance(state, DTensor) else state
        yield from (local.codes, local.scale) if hasattr(local, "codes") else (local,)


@pytest.mark.slow
def test_a_resumed_run_of_one_rank_equals_one_that_never_stopped(tmp_path: Path) -> None:
    folder, flags = write_inputs(tmp_path), "--optim adamw_8bit --max_steps 3 --save_steps 2"
    lines = [words(folder, "whole", flags)]
    lines += [words(folder, "rest", f"{flags} --resume_from_checkpoint {folder}/whole/checkpoint-2")]
    ((ends, _),) = spawn(1, run, lines)
    assert [end.status for end in ends] == [0, 0], ends[-1].err
    assert losses(folder, "rest") == losses(folder, "whole")[2:]  # to the bit


@pytest.mark.slow
def test_losses_follow_adamw_and_states_take_a_byte(files: Path) -> None:
    expected, got = losses(files, "wide"), losses(files, "narrow")
    assert min(expected) < expected[0] - 1
    assert got == pytest.approx(expected, rel=0.05) and got != expected
    assert int((files / "states").read_text()) == 2 * (QUANTIZED * (1 + 4 / 256) + 4 * NORMS)


@pytest.mark.slow
def test_a_resumed_run_equals_one_that_never_stopped(files: Path) -> None:
    assert losses(files, "resumed") == losses(files, "narrow")[HALF:]  # to the bit


@pytest.mark.slow
def test_pieces_train_as_the_whole_does(files: Path) -> None:
    assert losses(files, "pieces") == losses(files, "resumed")  # to the bit


@pytest.mark.parametrize("piece", [None, 2048])
def test_betas_and_epsilon_come_from_the_flags(piece: int | None) -> None:
    flags = {"adam_beta1": 0.5, "adam_beta2": 0.6, "adam_epsilon": 0.3}
    found, expected, plain = spawn(1, _updates, flags, piece)[0]
    assert found == pytest.approx(expected, rel=1e-5) and found != pytest.approx(plain, rel=0.05)


def _updates(rank: int, flags: dict[str, float], piece: int | None) -> list[list[float]]:
    """Three updates of a weight, whose states stay in 32 bits, with the flags, by torch, and without the flags."""
    torch.compiler.set_stance("force_eager")
    betas = flags["adam_beta1"], flags["adam_beta2"]

    def ours(given: dict[str, float], model: torch.nn.Module) -> torch.optim.Optimizer:
        config = TrainConfig(learning_rate=0.1, optim="adamw_8bit", **given)  # type: ignore[arg-type]
        optimizer = optimization.make_optimizer(model, config)
        if piece is not None:
            compute_updates_on(torch.device("cpu"), optimizer, piece)
        return optimizer

    def torchs(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), 0.1, betas, flags["adam_epsilon"], 0.0)

    return [updated(make).flatten().tolist() for make in (partial(ours, flags), torchs, partial(ours, {}))]


@pytest.mark.slow
def test_states_go_to_other_numbers_of_ranks_unless_a_block_would_be_cut(files: Path) -> None:
    flags = f"--optim adamw_8bit --max_steps {HALF + 1} {resume(files)}"
    assert [end.status for end in spawn(1, run, [words(files, "alone", flags)])[0][0]] == [0]
    assert losses(files, "alone") == pytest.approx(losses(files, "narrow")[HALF : HALF + 1], rel=1e-5)
    ends = [end for ends, _ in spawn(3, run, [words(files, "three", flags)]) for end in ends]
    said = "".join(end.err for end in ends)
    assert [end.status for end in ends] == [2] * 3 and said.count("\n") == 1
    assert "whose blocks cannot be split over 3 ranks; resume on as many ranks as it was saved on" in said
