"""Rehearsals and what they say of memory: parts that add up, the knob to turn, and an end that explains itself."""

import dataclasses
import io
import json
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

from lightseq import hf
from lightseq.attention.config import AttentionConfig
from lightseq.attention.context import make_context
from lightseq.attention.operator import attention
from lightseq.cli import BOTH
from lightseq.config.command_line import parse
from lightseq.config.train_config import TrainConfig
from lightseq.distributed.world import World
from lightseq.memory.offload import HostBufferPool
from lightseq.memory.planner.breakdown import loss_bytes, stored_activations
from lightseq.models.family import preset_config
from lightseq.modules import loss, mlp
from lightseq.modules.loss import cross_entropy_sum
from lightseq.modules.mlp import LinearWeights, gated_mlp
from lightseq.schedule.cost import AttentionShape
from lightseq.tools.plan.rehearsal import (
    MAX_WHOLE_TOKENS,
    STAGES,
    CountedMemory,
    rehearsal_config,
    rehearsal_patches,
    scaled_down,
)
from lightseq.training import errors
from lightseq.training.terminal import Terminal

REQUIRED = "--model_name_or_path tiny-llama3 --random_init --data_path d --output_dir o"


def given(words: str = "") -> TrainConfig:
    return parse(f"{REQUIRED} {words}".split(), "llama3/train.py")


def test_a_rehearsal_counts_a_ranks_parts_and_leaves_nothing_but_its_record(tmp_path: Path) -> None:
    length, flags = 1024, "--offload activations --model_max_length 1024 --remat full"
    output = tmp_path / "output"
    flags += f" --model_name_or_path tiny-llama3 --random_init --output_dir {output}"
    done, other = forked.World(2, f"-m lightseq rehearse {flags}", tmp_path).end()
    assert (done.returncode, other.returncode, other.stdout) == (0, 0, ""), done.stderr
    record = json.loads((output / "rehearsal.jsonl").read_text())
    model = preset_config(BOTH, "tiny-llama3")
    parameters = record["parts"]["parameters"]
    assert parameters == record["parts"]["gradients"] == record["parts"]["optimizer"] / 2
    assert "3,082,496 parameters" in done.stdout and abs(parameters - 4 * 3_082_496 / 2) < 0.01 * parameters
    # Each layer's input but the last one's, where they reach a MiB: half of 1024 tokens are less.
    assert record["offloaded_bytes"] == 0 and model.hidden_size * 4 * length / 2 < 2**20
    assert "cpu, elided" in done.stdout and "without a GPU only these parts are known" in done.stdout
    spent = record["spent"]
    assert list(spent) == list(STAGES) and min(spent.values()) > 0 and sum(spent.values()) == record["seconds"]
    assert f"took {record['seconds']:.0f} s: setting up {spent['setting up']:.0f}, " in done.stdout
    assert [path.name for path in output.iterdir()] == ["rehearsal.jsonl"]


def _elided(rank: int) -> None:
    world = dist.get_world_size()
    shape = AttentionShape(64, 4, 2, 8)
    config = AttentionConfig(dtype=torch.float32, device=torch.device("cpu"))
    for schedule in ("zigzag", "prefix", "ulysses"):
        with rehearsal_patches(64, world):
            context = make_context(dist.group.WORLD, shape, dataclasses.replace(config, schedule=schedule))
        q, kv = (torch.randn(1, 64 // world, n, 8, requires_grad=True) for n in (4, 2))
        before = context.transport.bytes_sent
        out, _ = attention(q, kv, kv, context)
        out.sum().backward()
        assert not out.any() and q.grad is not None and not q.grad.any()
        assert context.transport.bytes_sent > before  # messages are real


def test_elided_attention_moves_what_the_real_one_does_and_computes_nothing() -> None:
    spawn(2, _elided)


def test_flags_about_data_and_the_number_of_steps_do_not_reach_a_rehearsal(tmp_path: Path) -> None:
    words = "--max_eval_samples 3 --chat_template gone.jinja"
    words += ' --lr_scheduler_type warmup_stable_decay --lr_scheduler_kwargs {"num_decay_steps":50}'
    config = rehearsal_config(given(words), tmp_path)
    assert (config.max_eval_samples, config.chat_template, config.lr_scheduler_kwargs) == (None, None, None)


def test_rehearsals_of_long_sequences_run_only_the_first_tile() -> None:
    x, (gate, up), down = (
        torch.randn(10, 4, dtype=torch.float64),
        torch.randn(2, 6, 4).double(),
        torch.randn(4, 6).double(),
    )
    hidden, head, labels = torch.randn(10, 4), torch.randn(7, 4), torch.arange(10) % 7

    def results() -> tuple[torch.Tensor, torch.Tensor]:
        out = gated_mlp(x, [LinearWeights(gate), LinearWeights(up), LinearWeights(down)], 3)
        return out, cross_entropy_sum(hidden, head, labels, 4)

    whole, total = results()
    with rehearsal_patches(2 * MAX_WHOLE_TOKENS + 1, 2):
        first, part = results()
    assert torch.equal(whole[:3], first[:3]) and first.shape == whole.shape
    torch.testing.assert_close(part, cross_entropy_sum(hidden[:4], head, labels[:4], 4))
    with rehearsal_patches(2 * MAX_WHOLE_TOKENS, 2):  # short sequences run whole
        again = results()
    assert torch.equal(again[0], whole) and torch.equal(again[1], total)


def test_counted_host_memory_takes_one_buffer_and_the_limit_holds() -> None:
    for kind, places in ((CountedMemory, 1), (HostBufferPool, 10)):
        memory = kind(10 * 4096, pinned=False)
        taken = [memory.acquire(1024, torch.float32) for _ in range(11)]
        assert [x is None for x in taken] == [False] * 10 + [True]
        assert len({x.data_ptr() for x in taken if x is not None}) == places
        assert memory.allocated_bytes == 10 * 4096


def test_a_short_run_has_the_schedule_and_the_shrunk_tiles_of_the_long_one() -> None:
    before = (hf.enable, mlp.TILE_TOKENS, loss.CHUNK_TOKENS)
    with scaled_down(1000, 64_000):
        assert (mlp.TILE_TOKENS, loss.CHUNK_TOKENS) == (128, 64)
        assert hf.enable is not before[0]
    assert (hf.enable, mlp.TILE_TOKENS, loss.CHUNK_TOKENS) == before


def test_stored_activations_of_layers_by_hand() -> None:
    model = preset_config(BOTH, "llama3-8b")  # 32 layers, hidden 4096, 32 heads of 128
    layer_input, out, lse = 4096 * 2, 4096 * 2, 32 * 4
    assert stored_activations(model, given("--bf16 --remat full"), 10) == 10 * 32 * layer_input
    assert stored_activations(model, given("--bf16"), 10) == 10 * 32 * (layer_input + out + lse)
    products = 2 * 14336 * 2
    keeping = given("--bf16 --remat attention+mlp")
    assert stored_activations(model, keeping, 10) == 10 * 32 * (layer_input + out + lse + products)
    grouped = given("--bf16 --layers_per_checkpoint 5")
    assert stored_activations(model, grouped, 10) == 10 * (7 * layer_input + 5 * (layer_input + out + lse))
    logits, gradients = loss_bytes(model, given("--bf16"), 10_000)
    assert (logits, gradients) == (2048 * 128256 * 2, 128256 * 4096 * 4 + 10_000 * 4096 * 2)


OUT_OF_MEMORY = """
import sys, torch
import llama3
from lightseq.training import errors
from lightseq.training import trainer
from lightseq.training import command
errors.RANK_0_SECONDS = 1.0
def fail(self, step):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB.")
trainer.Trainer.step = fail
command.main(llama3.FAMILY, sys.argv[1:])
"""


OUT_OF_MEMORY_BUILDING = """
import sys, torch
import llama3
from lightseq.training import fsdp_engine
from lightseq.training import command
def fail(*_):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB.")
fsdp_engine.make_optimizer = fail
command.main(llama3.FAMILY, sys.argv[1:])
"""


def test_out_of_memory_while_the_model_is_built_ends_so_too(tmp_path: Path) -> None:
    (tmp_path / "fail.py").write_text(OUT_OF_MEMORY_BUILDING)
    data = tmp_path / "data.pkl"
    data.write_bytes(pickle.dumps({"input_ids": [list(range(64))] * 2}))
    words = f"--model_name_or_path tiny-llama3 --random_init --data_path {data} --output_dir {tmp_path / 'run'}"
    done = forked.run(f"{tmp_path}/fail.py {words}", tmp_path)
    assert done.returncode == 1 and done.stderr.count("Tried to allocate 7.00 GiB.") == 1, done.stderr
    assert "planned peak memory per GPU" in done.stderr and "to fit: " in done.stderr and "Traceback" not in done.stderr


OUT_OF_MEMORY_REHEARSING = """
import sys, torch
from lightseq.training import optimization
from lightseq.tools.plan import rehearsal
from lightseq.cli import BOTH
def fail(*_):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB.")
optimization.LocalAdamW.step = fail
rehearsal.main(BOTH, sys.argv[1:])
"""


def test_a_rehearsal_whose_optimizer_finds_no_room_ends_so_too(tmp_path: Path) -> None:
    (tmp_path / "fail.py").write_text(OUT_OF_MEMORY_REHEARSING)
    words = "--model_name_or_path tiny-llama3 --random_init --model_max_length 512"
    done = forked.run(f"{tmp_path}/fail.py {words}", tmp_path)
    assert done.returncode == 1 and done.stderr.count("Tried to allocate 7.00 GiB.") == 1, done.stderr
    assert "planned peak memory per GPU" in done.stderr and "to fit: " in done.stderr and "Traceback" not in done.stderr


UPDATES = """
import sys
from lightseq.training import optimization
from lightseq.tools.plan import rehearsal
from lightseq.cli import BOTH
def step(self, update=optimization.LocalAdamW.step):
    print("an update")
    return update(self)
optimization.LocalAdamW.step = step
rehearsal.main(BOTH, sys.argv[1:])
"""


@pytest.mark.parametrize(("offload", "updates"), [("none", 3), ("optimizer", 2)])
def test_the_optimizers_state_is_there_before_the_steps_where_it_takes_room_of_the_gpu(
    offload: str, updates: int, tmp_path: Path
) -> None:
    (tmp_path / "count.py").write_text(UPDATES)
    words = "--model_name_or_path tiny-llama3 --random_init --model_max_length 512"
    done = forked.run(f"{tmp_path}/count.py {words} --offload {offload}", tmp_path)
    assert done.returncode == 0 and done.stdout.count("an update") == updates, done.stderr


def test_out_of_memory_ends_with_the_parts_and_the_knob(tmp_path: Path) -> None:
    (tmp_path / "fail.py").write_text(OUT_OF_MEMORY)
    data = tmp_path / "data.pkl"
    data.write_bytes(pickle.dumps({"input_ids": [list(range(64))] * 2}))
    words = f"--model_name_or_path tiny-llama3 --random_init --data_path {data} --output_dir {tmp_path / 'run'}"
    ends = forked.World(2, f"{tmp_path}/fail.py {words} --max_steps 2", tmp_path).end()
    said = "".join(end.stderr for end in ends)
    assert [end.returncode for end in ends] == [1, 1]
    assert said.count("CUDA out of memory. Tried to allocate 7.00 GiB.") == 1, said
    assert "parameters" in said and "to fit: " in said


def ended_without_memory(rank: int, explaining: float, others_stay: float) -> tuple[float, float, str]:
    """When rank 0 had explained it, when this rank left, and what rank 0 had said before it began to explain."""
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


def test_an_end_that_no_memory_is_left_to_explain_is_one_all_the_same(
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
def test_ranks_stay_while_one_explains_but_not_for_ever(explaining: float, others_stay: float) -> None:
    (explained, _, said), (nothing, left, _) = spawn(2, ended_without_memory, explaining, others_stay)
    assert said == "error: rank 0: CUDA out of memory. Tried to allocate 7.00 GiB.\n", "a plan may take too long"
    assert nothing == 0.0 and (left > explained) == (others_stay > explaining)


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("CUDA error: out of memory\nCUDA kernel errors might be reported elsewhere", "CUDA error: out of memory"),
        ("Triton Error [CUDA]: out of memory", "Triton Error [CUDA]: out of memory"),
        (
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        ),
        ("NCCL error in: x.cpp\nLast error:\nCuda failure 2 'out of memory'", "Cuda failure 2 'out of memory'"),
        ("CUDA error: an illegal memory access was encountered", None),
    ],
)
def test_memory_that_libraries_find_full_is_told_from_other_errors(said: str, line: str | None) -> None:
    assert errors._out_of_memory_reason(RuntimeError(said)) == line
