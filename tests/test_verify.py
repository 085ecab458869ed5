"""Verification passes where nothing is wrong, under many flags, and names what is wrong where something was planted."""

import contextlib
import dataclasses
import io
import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import forked
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from worlds import spawn

from benchmarks.architectures import tiny_config
from lightseq.attention import buffers, context
from lightseq.attention import operator as attention
from lightseq.cli import BOTH
from lightseq.comm import transport as comm
from lightseq.config.command_line import parse
from lightseq.data.token_directory import write_token_directory
from lightseq.distributed.parallel_dims import ParallelDims
from lightseq.distributed.world import World
from lightseq.kernels.attention.torch_native import CpuKernel
from lightseq.memory import offload
from lightseq.models import random_weights
from lightseq.parts import mlp
from lightseq.schedule.algorithms import make_schedule
from lightseq.schedule.nodes import Nodes
from lightseq.schedule.table import Schedule
from lightseq.tools.verify import command as verify
from lightseq.tools.verify import machines
from lightseq.tools.verify.data import synthetic_rows
from lightseq.tools.verify.model import gradient_errors
from lightseq.tools.verify.report import PASS, Row, write
from lightseq.training import trainer
from lightseq.utils.formatting import differences

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")


class Outcome(NamedTuple):
    status: int
    printed: str
    rows: dict[str, dict[str, Any]]  # by check

    def failed(self) -> set[str]:
        return {check for check, row in self.rows.items() if row["status"] == "FAIL"}


def run(rank: int, words: str, folder: str) -> Outcome:
    """Runs the command in the process group that the test has joined."""
    world, out = World(rank, dist.get_world_size(), rank, dist.get_world_size(), CPU), io.StringIO()
    with contextlib.redirect_stdout(out):
        status = verify.verify(BOTH, [*shlex.split(words), "--output_dir", folder], world)
    lines = [json.loads(line) for line in (Path(folder) / "verify.jsonl").read_text().splitlines()]
    return Outcome(status, out.getvalue(), {line["check"]: line for line in lines[1:]})


def passes(rank: int, folder: str, cases: Sequence[str]) -> list[str]:
    """Returns the cases that did not pass."""
    offload.MIN_BYTES = 0
    wrong = []
    for case in cases:
        with mock.patch.object(mlp, "gated_mlp", wraps=mlp.gated_mlp) as tiled:
            ended = run(rank, case.replace("FOLDER", folder), folder)
        wrong += [f"{case}: no tiles"] if (LONG in case) != bool(tiled.call_count) else []
        wrong += [f"{case}: {ended.status}\n{ended.printed}"] if ended.status or ended.failed() else []
    return wrong


LONG = "300000"  # tokens, of which a rank would tile its MLPs
TINY2, TINY3 = (f"--model_name_or_path tiny-llama{n} --random_init --model_max_length" for n in (2, 3))
MIXTURE = "--model_name_or_path FOLDER/qwen3_moe --random_init --model_max_length 50 --expert_parallel_size"
QUICK = [
    f"{TINY3} {LONG} --schedule zigzag --offload activations --layers_per_checkpoint 2",
    f"{TINY2} 150 --schedule ulysses --fsdp '' --bf16",
    f"{TINY3} 50 --data_path FOLDER/pairs",  # a target that sees one token has no gradient of queries and keys
    f"{TINY3} 90 --packing best_fit --schedule prefix --gradient_accumulation_steps 2",
]
LATER = [  # experts and recurrences, which need a later transformers
    "--model_name_or_path FOLDER/falcon_h1 --random_init --model_max_length 50",  # decays to almost nothing
    f"{MIXTURE} 2",
]
GEMMA4 = {"num_kv_shared_layers": 0, "layer_types": [*["sliding_attention"] * 5, "full_attention"]}
FLAGS = {
    1: [f"{TINY3} 90 --schedule prefix --remat full", f"{TINY2} 70 --bf16 --gradient_accumulation_steps 3"],
    2: [
        "--model_name_or_path FOLDER/gemma4 --random_init --model_max_length 50",
        "--model_name_or_path FOLDER/qwen3_moe --random_init --model_max_length 50",
        "--model_name_or_path FOLDER/qwen3_5 --random_init --model_max_length 50",
        f"{TINY3} 70 --sequence_parallel_size 1 --per_device_train_batch_size 2 --fp16",
        f"{TINY3} 50 --data_path FOLDER/tokens --per_device_train_batch_size 3",
        f"{TINY3} 50 --data_path FOLDER/pairs --bf16 --schedule prefix",
        f"{TINY2} 60 --packing best_fit --schedule zigzag --data_path FOLDER/tokens --bf16",
        "--model_name_or_path FOLDER/llama4 --random_init --model_max_length 50 --bf16",
        f'{TINY2} 5 --schedule auto --rope_scaling \'{{"rope_type": "dynamic", "factor": 2}}\'',
    ],
    3: [
        f"{TINY2} 150 --schedule prefix --fsdp '' --offload both",
        f"{TINY3} 150 --schedule balanced --remat full --bf16",
        f"{TINY2} 150 --schedule striped --remat none --tf32 --gradient_accumulation_steps 2",
        f"{MIXTURE} 3",
    ],
    4: [f"{MIXTURE} 4", f"{MIXTURE} 2"],
}


@pytest.mark.compat
@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        pytest.param(2, QUICK, marks=pytest.mark.slow),
        pytest.param(2, LATER, marks=pytest.mark.compat("5.22")),
        *(pytest.param(n, FLAGS[n], marks=pytest.mark.slow) for n in FLAGS),
    ],
)
def test_everything_passes_where_nothing_is_wrong(ranks: int, flags: list[str], tmp_path: Path) -> None:
    write_token_directory(tmp_path / "tokens", [np.arange(size) * 7 % 500 for size in (300, 20, 44)], 512, dict)
    write_token_directory(tmp_path / "pairs", [np.array([7, 9])] * 8, 512, dict)
    tiny_config("llama4").save_pretrained(tmp_path / "llama4")
    tiny_config("gemma4_text", num_hidden_layers=6, **GEMMA4).save_pretrained(tmp_path / "gemma4")
    tiny_config("falcon_h1").save_pretrained(tmp_path / "falcon_h1")
    tiny_config("qwen3_moe", num_local_experts=12).save_pretrained(tmp_path / "qwen3_moe")
    tiny_config("qwen3_5", image_token_id=60, video_token_id=61).save_pretrained(tmp_path / "qwen3_5")
    for wrong in spawn(ranks, passes, str(tmp_path), flags):
        assert not wrong, "\n".join(wrong)


def test_the_models_tokenizer_reads_rows_and_not_tokens(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").touch()
    for name, tokenizer in (("rows.jsonl", "tiny-llama3"), ("tokens", None)):
        words = f"--model_name_or_path tiny-llama3 --output_dir o --data_path {tmp_path}/{name}"
        assert verify.one_step(parse(words.split(), ""), tmp_path).tokenizer == tokenizer


def test_only_flags_that_change_a_step_are_verified(tmp_path: Path) -> None:
    words = "--model_name_or_path tiny-llama3 --output_dir o --adam_beta2 0.95 --adam_epsilon 1e-6 --bf16 --remat full"
    words += ' --lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs {"min_lr":1e-6}'
    words += " --max_eval_samples 3 --chat_template gone.jinja"
    config = verify.one_step(parse(words.split(), "", required=("model_name_or_path",)), tmp_path)
    assert (config.optim, config.max_eval_samples, config.chat_template) == ("sgd", None, None)
    assert (config.bf16, config.remat) == (True, "full")


# ---- planted faults ------------------------------------------------------------------------------------------------


def _without_a_move(*args: Any) -> Schedule:
    """Returns a schedule whose first operand that travels in the forward pass stays at home."""
    schedule = make_schedule(*args)
    if schedule.world == 1:  # of the run on the meta device
        return schedule
    t = next(i for i, step in enumerate(schedule.forward) if step.moves)
    step = dataclasses.replace(schedule.forward[t], moves=schedule.forward[t].moves[1:])
    return dataclasses.replace(schedule, forward=(*schedule.forward[:t], step, *schedule.forward[t + 1 :]))


@contextlib.contextmanager
def _drop_move(rank: int) -> Iterator[None]:
    """Fills new buffers, whose memory could hold the right values by chance."""
    empty = buffers.BufferLayout.empty

    def filled(self: buffers.BufferLayout, chunks: int, device: torch.device) -> buffers.Buffer:
        return tuple(x.fill_(0.5) for x in empty(self, chunks, device))

    with mock.patch.object(context, "make_schedule", _without_a_move):
        with mock.patch.object(buffers.BufferLayout, "empty", filled):
            yield


def _instead(owner: Any, name: str, wrong: Callable[..., Any]) -> Any:
    """Plants a function that gets the right one, and its arguments."""
    right = getattr(owner, name)
    return mock.patch.object(owner, name, lambda *args, **kwargs: wrong(right, *args, **kwargs))


def _shift_labels(rank: int) -> Any:
    def once_more_inside_the_shard(right: Any, *args: Any) -> Any:
        mine = right(*args)
        return mine._replace(labels=mine.labels.roll(-1, 1))

    return _instead(trainer.Sharding, "__call__", once_more_inside_the_shard)


def _forget_where_documents_begin(rank: int) -> Any:
    """Leaves positions right, and attends over the borders of documents."""
    return _instead(
        attention, "packed_schedule", lambda right, schedule, nodes: right(schedule, Nodes((0, nodes.length)))
    )


def _divide_wrongly(rank: int) -> Any:
    return _instead(ParallelDims, "sum_over_batches", lambda right, self, count: right(self, count) + 3)


def _align_upper_left(rank: int) -> Any:
    return mock.patch.object(CpuKernel, "causal_alignment", "bottom_right")  # which it is not


def _another_seed(rank: int) -> Any:
    return _instead(
        random_weights,
        "initialize",
        lambda right, model, seed, *args, **kwargs: right(model, seed + rank, *args, **kwargs),
    )


def _corrupt_a_byte(rank: int) -> Any:
    calls = iter(range(10**9))

    def spoiled(right: Any, self: Any, exchange: comm.Exchange) -> Callable[[], None]:
        hit = rank == 1 and next(calls) % 8 == 5 and bool(exchange.receives)

        def on_received(received: list[Tensor]) -> None:
            if hit:
                received[0].view(-1).view(torch.uint8)[7] ^= 16
            if exchange.on_received is not None:
                exchange.on_received(received)

        return right(self, exchange._replace(on_received=on_received))

    return _instead(comm.SendRecvTransport, "exchange", spoiled)


def _older_software(rank: int) -> Any:
    return _instead(machines, "software", lambda right, device: right(device) | ({"torch": "2.0"} if rank else {}))


class Fault(NamedTuple):
    plant: Callable[[int], Any]
    words: str
    fails: set[str]  # these checks at least
    says: tuple[str, str]  # a check and a part of its line


FAULTS = {
    "a move is dropped": Fault(_drop_move, "", {"loss", "gradients"}, ("gradients", "parameters, worst: ")),
    "labels are shifted in the shard": Fault(_shift_labels, "", {"loss", "gradients"}, ("loss", ", plain ")),
    "documents see each other": Fault(
        _forget_where_documents_begin, "--packing best_fit", {"loss", "gradients"}, ("gradients", "parameters, worst: ")
    ),
    "a wrong divisor": Fault(_divide_wrongly, "", {"loss", "gradients"}, ("loss", ", plain ")),
    "a kernel aligned upper-left": Fault(_align_upper_left, "", {"kernel cpu"}, ("kernel cpu", "causal 64x192")),
    "the same where it matters": Fault(
        _align_upper_left, "--schedule prefix", {"kernel cpu", "gradients"}, ("kernel cpu", "(rank 1)")
    ),
    "another seed on one rank": Fault(_another_seed, "", {"loss", "gradients"}, ("loss", ", plain ")),
    "a corrupted byte": Fault(
        _corrupt_a_byte, "", {"transport gloo"}, ("transport gloo", "1 of 65,536 bytes wrong in exchange")
    ),
    "other software on one rank": Fault(_older_software, "", {"ranks"}, ("ranks", "torch is 2.0 on rank 1")),
    "other flags on one rank": Fault(
        lambda rank: contextlib.nullcontext(), "--seed {rank}", {"ranks"}, ("ranks", "--seed is 1 on rank 1 and 0 on")
    ),
}


QUICK_FAULTS = (
    *("a move is dropped", "documents see each other", "a kernel aligned upper-left"),
    *("a corrupted byte", "other flags on one rank"),
)


def caught(rank: int, folder: str, names: Sequence[str]) -> list[str]:
    """Returns the faults that did not fail their checks."""
    wrong = []
    for name in names:
        fault = FAULTS[name]
        with fault.plant(rank):
            ended = run(rank, f"{TINY2} 120 --schedule zigzag {fault.words.format(rank=rank)}", folder)
        check, words = fault.says
        if ended.status != 1 or not fault.fails <= ended.failed() or words not in ended.rows[check]["detail"]:
            wrong.append(f"{name}: status {ended.status}, {ended.rows.get(check)}\n{ended.printed}")
    return wrong


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(QUICK_FAULTS, id="quick"),
        pytest.param([name for name in FAULTS if name not in QUICK_FAULTS], id="others", marks=pytest.mark.slow),
    ],
)
def test_every_planted_fault_fails_the_check_that_it_breaks(names: Sequence[str], tmp_path: Path) -> None:
    assert spawn(2, caught, str(tmp_path), names) == [[], []]


def refused(rank: int, folder: str, cases: Sequence[tuple[str, str]]) -> list[str]:
    """Returns the cases that did not end with status 2 and their line, printed by one rank."""
    wrong = []
    for words, line in cases:
        err, status = io.StringIO(), 0
        with contextlib.redirect_stderr(err):
            try:
                run(rank, words, folder)
            except SystemExit as end:
                status = int(end.code or 0)
        lines: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(lines, err.getvalue())
        if status != 2 or len("".join(lines).splitlines()) != 1 or line not in "".join(lines):
            wrong.append(f"{words}: status {status}, {lines}")
    return wrong


def test_refusals_of_training_end_verify_with_status_2_and_one_line(tmp_path: Path) -> None:
    cases = [
        (f"{TINY3} 100 --schedule nonsense", "error: --schedule 'nonsense' is unknown"),
        (f"{TINY3} 100 --kernel fa4", "error: kernel fa4 cannot run here"),
        (f"{TINY3} 100 --data_path {tmp_path}/none", "none does not exist"),
        ("--model_name_or_path tiny-llama9", "tiny-llama9 is not a directory, hub id or preset"),
        (f"{TINY3} 100 --sequence_parallel_size 5", "does not divide 2 ranks; use 1 or 2"),
    ]
    assert spawn(2, refused, str(tmp_path), cases) == [[], []]
    assert not any(tmp_path.iterdir())


def test_packed_data_without_a_target_in_the_first_step_are_refused(tmp_path: Path) -> None:
    data = tmp_path / "data"
    targets = np.arange(50) == 49
    write_token_directory(data, [(np.arange(50), targets)], 64, dict, with_targets=True)
    cases = [(f"{TINY3} {length} --packing best_fit --data_path {data}", "has no target in the") for length in (1, 33)]
    assert spawn(2, refused, str(tmp_path), cases) == [[], []]


# ---- the parts ------------------------------------------------------------------------------------------------------


def test_gradients_that_are_zero_in_theory_are_not_errors_and_small_ones_are_compared() -> None:
    draw = torch.Generator().manual_seed(0)
    weight, small = torch.randn(50, 50, generator=draw), 1e-4 * torch.randn(50, generator=draw)
    mine, theirs = (1e-9 * torch.randn(50, generator=draw) for _ in range(2))  # what rounding leaves of zero
    want = {"weight": weight, "small": small, "bias": theirs, "unused": torch.zeros(3)}
    assert max(gradient_errors({**want, "bias": mine}, want).values()) < 1e-6
    for wrong in ({"small": 2 * small}, {"bias": mine + 1e-3}, {"unused": torch.ones(3)}):
        assert gradient_errors({**want, **wrong}, want)[next(iter(wrong))] > 1e-4


def test_synthetic_rows_are_cut_padded_and_partly_ignored() -> None:
    rows = synthetic_rows(4, 40, np.arange(50))
    assert [len(ids) for ids in rows["input_ids"]] == [43, 21, 40, 10]
    assert rows["labels"][0][40] == rows["input_ids"][0][40], "a target at the border"
    for labels in map(torch.tensor, rows["labels"]):
        ignored = labels == -100
        assert ignored[: int(0.4 * len(labels))].all() and 0 < (~ignored).sum() < 0.7 * len(labels)


def test_differences_name_the_ranks_that_share_them() -> None:
    everyone = [{"torch": "2.13", "nccl": "2.28"}, {"torch": "2.12", "nccl": "2.28"}, {"torch": "2.12"}]
    assert differences(everyone) == [
        "torch is 2.12 on rank 1, 2 and 2.13 on rank 0",
        "nccl is none on rank 2 and 2.28 on rank 0",
    ]


def test_the_command_describes_its_run_prints_a_table_and_leaves_only_its_record(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2
    )
    model, output = LlamaForCausalLM(config), tmp_path / "output"
    model.save_pretrained(tmp_path / "model")
    words = f"-m lightseq verify --model_name_or_path {tmp_path}/model --model_max_length 32 --output_dir {output}"
    done, other = forked.World(2, words, tmp_path, {"COLUMNS": "80"}).end()
    assert (done.returncode, other.returncode, other.stdout) == (0, 0, ""), done.stderr
    lines = done.stdout.splitlines()
    count = sum(p.numel() for name, p in model.named_parameters() if "layers.2." not in name)
    assert lines[0].split(maxsplit=1)[1] == (
        f"architecture of {tmp_path}/model, {count:,} parameters in 2 layers, random weights"
    )
    assert lines[1].endswith("synthetic.pkl, 1 example")
    drawn = lines[next(i for i, line in enumerate(lines) if line.startswith("check ")) :]
    assert len(drawn) > 10 and max(map(len, drawn[:-1])) <= 80 and drawn[-1].startswith("all passed in ")
    assert [path.name for path in output.iterdir()] == ["verify.jsonl"]
    head, *rows = [json.loads(line) for line in (output / "verify.jsonl").read_text().splitlines()]
    assert head["passed"] and head["command"].startswith("lightseq verify") and "torch" in head["versions"]
    assert head["config"]["data_path"] is None
    gradients = next(row for row in rows if row["check"] == "gradients")
    assert set(gradients["errors"]) == set(gradients["allowed"]) and max(gradients["errors"].values()) < 1e-5


def test_a_record_keeps_no_secret(tmp_path: Path) -> None:
    row = Row("flags", PASS, "--tokenizer=correct horse", {"command": "correct horse"})
    write(tmp_path / "verify.jsonl", {"config": {"tokenizer": "correct horse"}}, [row], ["correct horse"])
    text = (tmp_path / "verify.jsonl").read_text()
    assert "horse" not in text and text.count("***") == 3


@pytest.mark.parametrize("flag", ["--lora_rank 4", "--router_aux_loss_coef 0.3", "--router_bias_update_rate 0.1"])
def test_flags_that_no_check_covers_are_refused(flag: str) -> None:
    words = ["--model_name_or_path", "tiny-llama3", "--model_max_length", "64", *flag.split()]
    with pytest.raises(ValueError, match=f"{flag} is not supported by verify; leave it out"):
        verify._parse(words)
