"""The attention benchmark: what it measures, records, skips and refuses."""

import contextlib
import io
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from worlds import spawn

from benchmarks import attention, attention_points
from benchmarks.attention_flags import Choice, parse, parser
from benchmarks.attention_peers import PEERS, ring_flash_attn, ulysses
from benchmarks.layers import lightseq_layer, single_gpu_layer
from benchmarks.measure import Case, Disagreement, Layer, Skipped, time_layer, together
from lightseq.distributed.world import World

ROOT = Path(__file__).resolve().parent.parent
SMALL = "--heads 4 --kv_heads 2 --head_dim 8 --seconds 0.02"
KEYS = {
    "length", "world", "heads", "kv_heads", "head_dim", "dtype", "batch", "implementation", "request", "schedule",
    "head_groups", "ulysses_size", "kernel", "transport", "skipped",
}  # fmt: skip


def case(tokens: int = 32, **changes: Any) -> Case:
    facts = {"heads": 4, "kv_heads": 2, "head_dim": 8, "dtype": torch.float32} | changes
    assert dist.group.WORLD is not None
    return Case(tokens, device=torch.device("cpu"), group=dist.group.WORLD, **facts)


def program(rank: int, words: str, more_peers: dict[str, Any] | None = None) -> tuple[int, str, str]:
    """The benchmark on this rank, in the process group that the test has joined already: status, out, err."""
    size = dist.get_world_size()
    world = World(rank, size, rank, size, torch.device("cpu"))
    attention_points.init_distributed = lambda timeout_seconds: contextlib.nullcontext(world)  # type: ignore[assignment]
    PEERS.update(more_peers or {})
    status, out, err = 0, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            attention.main(shlex.split(words))
        except SystemExit as end:
            status = int(end.code or 0)
    dist.barrier()
    return status, out.getvalue(), err.getvalue()


def records(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    header, *rest = map(json.loads, path.read_text().splitlines())
    return header, rest


@pytest.mark.slow
def test_a_run_on_two_ranks_records_every_point_under_a_header(tmp_path: Path) -> None:
    file = tmp_path / "new" / "a.jsonl"
    words = f"--lengths 64,1K {SMALL} --schedules ring,auto --transports gloo,auto-blocking"
    words += f" --peers single-gpu,ulysses-sdpa --output {file}"
    (status, out, _), (_, other_out, _) = spawn(2, program, words)
    assert (status, other_out) == (0, "")
    header, points = records(file)
    assert (header["benchmark"], header["world"], header["versions"]["torch"]) == ("attention", 2, version("torch"))
    assert header["command"].endswith(f"benchmarks/attention.py {words}")
    assert all(point.keys() >= KEYS and point["skipped"] is None for point in points)
    asked = ["", "", "ring", "ring", "auto", "auto"]
    assert [(p["length"], p["request"]) for p in points] == [(n, request) for n in (64, 1024) for request in asked]
    assert [p["implementation"] for p in points[:3]] == ["single-gpu", "ulysses-sdpa", "lightseq"]
    for point in points:
        ranks = 1 if point["implementation"] == "single-gpu" else 2
        flops = 2.0 * 2 * point["length"] ** 2 / 2 * 4 * 8 * 3.5  # two products, the causal half, 4 heads of 8
        assert point["world"] == ranks
        assert point["tflops_per_gpu"] == pytest.approx(flops / ranks / point["seconds_median"] / 1e12)
        assert 0 < point["seconds_min"] <= point["seconds_median"] <= point["seconds_max"]
        assert 3 <= point["repeats"] <= 20
    ours = [point for point in points if point["implementation"] == "lightseq"]
    assert {(p["kernel"], p["transport"]) for p in ours} == {("cpu", "gloo"), ("cpu", "gloo-blocking")}
    assert len(out.splitlines()) == len(points) + 1
    assert "64  single-gpu, cpu: " in out and "1K  lightseq auto → " in out and "TFLOP/s" in out


@contextlib.contextmanager
def absent(case: Case) -> Iterator[Layer]:
    raise ImportError("No module named 'absent'")
    yield


@contextlib.contextmanager
def greedy(case: Case) -> Iterator[Layer]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("tried to allocate 3 TiB;\nand more to say")

    yield Layer(attend, torch.arange(case.length), 1)


@contextlib.contextmanager
def lame(case: Case) -> Iterator[Layer]:
    """Sets up on one rank only."""
    if case.rank == 1:
        raise RuntimeError("no luck")
    yield Layer(lambda q, k, v: q, torch.arange(case.length), 1)


def test_implementations_that_cannot_run_are_skipped_with_a_reason(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    words = f"--lengths 64 {SMALL} --schedules zigzag --peers absent,greedy,lame --output {file}"
    bad = {"absent": absent, "greedy": greedy, "lame": lame}
    (status, out, _), _ = spawn(2, program, words, bad)
    assert status == 0
    points = records(file)[1]
    assert [(p["implementation"], p["skipped"]) for p in points] == [
        ("absent", "No module named 'absent'"),
        ("greedy", "out of memory"),
        ("lame", "RuntimeError: no luck"),
        ("lightseq", None),
    ]
    assert all(p["tflops_per_gpu"] is None for p in points[:3])
    assert out.splitlines()[1].endswith("greedy: skipped: out of memory")


def split_failures(rank: int) -> list[str]:
    def fail_on_one() -> None:
        if rank == 1:
            raise RuntimeError("no luck")

    said = []
    for fatal in (False, True):
        with pytest.raises((Skipped, Disagreement)) as why:
            together(case(), fail_on_one, fatal_if_split=fatal)
        said.append(f"{why.typename}: {why.value}")
    return said


def test_a_failure_on_some_ranks_skips_a_setup_and_stops_a_layer_under_way() -> None:
    want = ["Skipped: RuntimeError: no luck", "Disagreement: RuntimeError: no luck (on 1 of 2 ranks)"]
    assert spawn(2, split_failures) == [want, want]


def slow_rank(rank: int) -> list[dict[str, Any]]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        time.sleep(0.03 if rank == 1 else 0.0)
        return q * 1 + (k.sum() + v.sum()) * 0

    layer = Layer(attend, torch.arange(8), 2)
    efforts = [["--seconds", words] for words in ("0", "0.3", "60")]
    common = ["--warmup", "1", "--repeats", "12"]
    return [time_layer(layer, case(8), parser().parse_args([*common, *effort])) for effort in efforts]


def test_the_slowest_rank_is_the_time_and_repeats_fit_the_seconds_between_their_bounds() -> None:
    for none, some, many in spawn(2, slow_rank):
        assert none["seconds_min"] >= 0.03
        assert none["repeats"] == 3 <= some["repeats"] <= 10 and many["repeats"] == 12


def layer_error(rank: int, boundaries: tuple[int, ...], window: int | None) -> float:
    """Returns the largest difference between lightseq's layer and its peers on CPU, output and gradients of all."""
    whole = case(64, boundaries=boundaries, window=window)
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator) for shape in whole.shapes(64)]

    def results(layer: Layer) -> list[Tensor]:
        q, k, v, dout = (x[:, layer.positions].requires_grad_() for x in tensors)
        out = layer.attend(q, k, v)
        every: list[Any] = [None] * layer.ranks
        local = [x.detach() for x in (out, *torch.autograd.grad(out, (q, k, v), dout))]
        if layer.ranks == 1:
            return local
        dist.all_gather_object(every, (layer.positions, local))
        order = torch.cat([positions for positions, _ in every]).argsort()
        return [torch.cat(parts, 1)[:, order] for parts in zip(*(x for _, x in every), strict=True)]

    with single_gpu_layer(whole, "cpu") as alone, lightseq_layer(whole, Choice("prefix")) as ours:
        made = [results(alone), results(ours)]
    if not boundaries and window is None:
        with ulysses.layer(whole, "sdpa") as peer:
            made.append(results(peer))
    return max((x - y).abs().max().item() for other in made[1:] for x, y in zip(other, made[0], strict=True))


@pytest.mark.parametrize(("boundaries", "window"), [((), None), ((0, 24, 64), None), ((), 9)])
def test_layers_compute_the_same(boundaries: tuple[int, ...], window: int | None) -> None:
    assert max(spawn(2, layer_error, boundaries, window)) < 1e-5


def test_windows_and_packed_documents_are_recorded(tmp_path: Path) -> None:
    for name, flags in (("w", "--window 9"), ("d", "--documents lognormal:0:8:64")):
        file = tmp_path / f"{name}.jsonl"
        words = f"--lengths 96 {SMALL} --schedules prefix {flags} --peers single-gpu,ulysses-sdpa --output {file}"
        status, _, error = spawn(2, program, words)[0]
        assert status == 0, error
    for file, key, value, skipped in (
        ("w", "window", 9, "has no sliding window here"),
        ("d", "documents", "lognormal:0:8:64", "would attend across documents"),
    ):
        alone, peer, ours = records(tmp_path / f"{file}.jsonl")[1]
        assert (alone["implementation"], ours["implementation"], peer["skipped"]) == ("single-gpu", "lightseq", skipped)
        assert all(point[key] == value and point["tflops_per_gpu"] > 0 for point in (alone, ours))
    assert attention_points.boundaries("lognormal:0:8:64", 96)[-1] == 96


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--lengths 1X", "--lengths: 1X is not a number of tokens"),
        ("--lengths 1K,,2K", "--lengths: '1K,,2K' has an empty item"),
        ("--schedules spiral", "--schedules: 'spiral' is unknown; choose from auto, all, none, ring"),
        ("--schedules prefix@depth=2", "write head_groups=N or ulysses_size=N after @"),
        ("--peers nobody", "--peers: 'nobody' is unknown"),
        ("--heads 5 --kv_heads 2", "--heads 5 is not a multiple"),
        ("--heads 0", "--heads: '0' is not a positive whole number"),
        ("--seconds inf", "--seconds: 'inf' is not a number of seconds"),
        ("--documents uniform:0", "--documents: 'uniform:0' is not a distribution"),
        ("--documents lognormal:0:64:16", "lengths must start at 1 token or more"),
        ("--schedules none --peers none", "nothing to measure"),
        ("--length 1K", "unrecognized arguments: --length"),
    ],
)
def test_bad_flags_are_refused_with_what_is_wrong(words: str, said: str) -> None:
    with pytest.raises(ValueError) as refusal:
        parse(words.split())
    assert said in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.slow
def test_the_program_alone_refuses_in_one_line_and_exits_2(tmp_path: Path) -> None:
    file = tmp_path / "there.jsonl"
    file.touch()
    words = [sys.executable, ROOT / "benchmarks" / "attention.py", "--output", file]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if "OMP_NUM" not in line]
    assert (done.returncode, said) == (2, [f"error: --output {file} exists; give another file"])


def test_requests_say_what_a_schedule_is_asked_for(tmp_path: Path) -> None:
    words = "--schedules prefix@head_groups=2,usp@ulysses_size=2,auto --lengths 2k,1M,100"
    flags = parse([*words.split(), "--output", str(tmp_path / "new.jsonl")])
    assert flags.schedules == [
        ("prefix@head_groups=2", Choice("prefix", head_groups=2)),
        ("usp@ulysses_size=2", Choice("usp", ulysses_size=2)),
        ("auto", Choice()),
    ]
    assert flags.lengths == [2048, 2**20, 100]


def test_ring_flash_attn_is_imported_without_flash_attn_and_its_own_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "ring_flash_attn"
    (package / "adapters").mkdir(parents=True)
    (package / "adapters" / "__init__.py").write_text("raise ImportError('a name that transformers 5 dropped')\n")
    (package / "__init__.py").write_text(
        "from flash_attn.flash_attn_interface import _flash_attn_forward, _flash_attn_varlen_forward\n"
        "from .adapters import substitute_hf_flash_attn, update_ring_flash_attn_params\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(ring_flash_attn, "flash_attn_is_missing", lambda: True)
    try:
        assert ring_flash_attn.import_package()._flash_attn_varlen_forward is ring_flash_attn._varlen_forward
        assert "flash_attn.flash_attn_interface" not in sys.modules
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "ring_flash_attn"]:
            del sys.modules[name]
