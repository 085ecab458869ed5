"""Out-of-memory errors: recognized, explained once with a remedy, and ending every rank."""

import io
import pickle
import sys
import time
from contextlib import redirect_stderr
from pathlib import Path

import forked
import pytest
import torch
import torch.distributed as dist
from worlds import spawn

from lightseq.distributed.world import World
from lightseq.training import errors
from lightseq.training.terminal import Terminal

FAILS = """
import sys, torch
import llama3
from lightseq.training import command, errors, fsdp_engine, trainer
errors.RANK_0_SECONDS = 1.0
def fail(*_):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB.")
{place} = fail
command.main(llama3.FAMILY, sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("place", "ranks"),
    [("fsdp_engine.make_optimizer", 1), pytest.param("trainer.Trainer.step", 2, marks=pytest.mark.slow)],
)
def test_running_out_of_memory_ends_with_the_breakdown_and_a_remedy(place: str, ranks: int, tmp_path: Path) -> None:
    (tmp_path / "fail.py").write_text(FAILS.format(place=place))
    data = tmp_path / "data.pkl"
    data.write_bytes(pickle.dumps({"input_ids": [list(range(64))] * 2}))
    words = f"--model_name_or_path tiny-llama3 --random_init --data_path {data} --output_dir {tmp_path / 'run'}"
    ends = forked.World(ranks, f"{tmp_path}/fail.py {words} --max_steps 2", tmp_path).end()
    said = "".join(end.stderr for end in ends)
    assert [end.returncode for end in ends] == [1] * ranks
    assert said.count("CUDA out of memory. Tried to allocate 7.00 GiB.") == 1, said
    assert "planned peak memory per GPU" in said and "parameters" in said and "to fit: " in said
    assert "Traceback" not in said


def ended_without_memory(rank: int, explaining: float, others_stay: float) -> tuple[float, float, str]:
    """Returns when rank 0 had explained, when this rank left, and what rank 0 had printed before it explained."""
    errors.RANK_0_SECONDS, errors.EXPLAINING_SECONDS = 0.2, others_stay
    errors.exit_process = sys.exit  # type: ignore[assignment]
    explained, said, err = 0.0, "", io.StringIO()

    def explain() -> list[str]:
        nonlocal explained, said
        said = err.getvalue()
        time.sleep(explaining)
        explained = time.monotonic()
        return ["to fit: less"]

    world = World(rank, 2, rank, 2, torch.device("cpu"))
    dist.barrier()
    with (
        redirect_stderr(err),
        pytest.raises(SystemExit),
        errors.exit_on_out_of_memory(world, Terminal(1, 0), explain),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB.")
    return explained, time.monotonic(), said


def test_a_rank_without_memory_for_the_explanation_ends_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[str] = []

    def explain() -> list[str]:
        raise MemoryError

    for name, stand_in in (("is_first_to", bool), ("mark_done", done.append), ("exit_process", sys.exit)):
        monkeypatch.setattr(errors, name, stand_in)
    world = World(0, 1, 0, 1, torch.device("cpu"))
    with pytest.raises(SystemExit), errors.exit_on_out_of_memory(world, Terminal(1, 0), explain):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB.")
    said = capsys.readouterr().err
    assert said == "error: rank 0: CUDA out of memory. Tried to allocate 7.00 GiB.\n" and done == ["explain"]


@pytest.mark.parametrize(("explaining", "others_stay"), [(1.0, 60.0), (3.0, 0.2)])
def test_ranks_wait_for_the_explanation_but_not_for_ever(explaining: float, others_stay: float) -> None:
    (explained, _, said), (nothing, left, _) = spawn(2, ended_without_memory, explaining, others_stay)
    assert said == "error: rank 0: CUDA out of memory. Tried to allocate 7.00 GiB.\n", "a plan may take too long"
    assert nothing == 0.0 and (left > explained) == (others_stay > explaining)


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("CUDA error: out of memory\nCUDA kernel errors might be reported elsewhere", "CUDA error: out of memory"),
        ("Triton Error [CUDA]: out of memory", "Triton Error [CUDA]: out of memory"),
        (*["CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"] * 2,),
        ("NCCL error in: x.cpp\nLast error:\nCuda failure 2 'out of memory'", "Cuda failure 2 'out of memory'"),
        ("CUDA error: an illegal memory access was encountered", None),
    ],
)
def test_out_of_memory_errors_of_libraries_are_recognized(said: str, line: str | None) -> None:
    assert errors._out_of_memory_reason(RuntimeError(said)) == line
