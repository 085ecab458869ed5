"""Traces of steps: the account of every millisecond, and data transfers and how fast."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from analysis.__main__ import main
from lightseq.profiling.trace import IDLE, KINDS, gpu_breakdown, kind_of, summary
from lightseq.profiling.transfers import transfers_by_kind

KERNELS = {
    "void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>": "attention, backward",
    "kernel_cutlass_kernel_flash_attncuteflash_bwd_sm90FlashAttentionBackwardSm90_object": "attention, backward",
    "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object": "attention, forward",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob": "attention, forward",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob": "attention, backward",
    "nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_TNN": "matrix products",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float>": "matrix products",
    "_cross_entropy": "loss",
    "_backward": "MLP's product",
    "triton_poi_fused_mul_silu_4": "compiled layers' glue",
    "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>": "optimizer, norm, clip",
    "void at::native::multi_tensor_apply_kernel<TensorListMetadata<2>, CopyFunctor<float>>": "weights: cast and join",
    "void at::native::detail::chunk_cat_cuda_kernel<float, c10::BFloat16>": "weights: cast and join",
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "collectives",
    "c10d::symmetric_memory::barrier_kernel(unsigned int**, int)": "attention's exchange",
    "Memcpy PtoP (Device -> Device)": "attention's exchange",
    "_copy": "attention's exchange",
    "Memcpy HtoD (Pinned -> Device)": "host copies",
    "void at::native::elementwise_kernel<128, 2>": "other kernels",
}


@pytest.mark.parametrize(("kernel", "kind"), KERNELS.items())
def test_a_kernel_is_counted_as_what_it_is_for(kernel: str, kind: str) -> None:
    assert KINDS[kind_of(kernel)][0] == kind


def event(name: str, start_ms: float, ms: float, category: str = "kernel", launch: int = 0) -> dict[str, Any]:
    arguments = {"correlation": launch} if launch else {}
    return {"ph": "X", "cat": category, "name": name, "ts": start_ms * 1e3, "dur": ms * 1e3, "args": arguments}


def two_steps() -> list[dict[str, Any]]:
    """Each: 2 ms of forward attention, a collective of 3 ms beside its second half, 1 ms of nothing, 4 ms of update."""
    events = []
    for i, begin in enumerate((0.0, 9.0)):
        first = 10 * i
        events += [
            event(f"step {i + 4}", begin, 0.9, "user_annotation"),
            event("forward", begin, 0.4, "user_annotation"),
            event("update", begin + 0.5, 0.3, "user_annotation"),
            event("cudaLaunchKernel", begin + 0.1, 0.01, "cuda_runtime", first + 1),
            event("cudaLaunchKernel", begin + 0.2, 0.01, "cuda_runtime", first + 2),
            event("cudaLaunchKernel", begin + 0.6, 0.01, "cuda_runtime", first + 3),
            event("flash_fwd_kernel", begin, 2, launch=first + 1),
            event("ncclDevKernel_AllGather", begin + 1, 3, launch=first + 2),
            event("FusedAdam", begin + 5, 4, launch=first + 3),
        ]
    return events


def test_every_millisecond_counts_once_and_hidden_communication_apart() -> None:
    account = gpu_breakdown(two_steps())
    assert (account.steps, account.step_ms) == (2, pytest.approx(9))
    spent = {key: pytest.approx(ms) for key, ms in account.spent.items()}
    assert spent == {
        ("attention, forward", "forward"): 2,
        ("collectives", "forward"): 2,
        (IDLE, "update"): 1,
        ("optimizer, norm, clip", "update"): 4,
    }
    assert account.hidden["collectives"] == pytest.approx(1) and account.hidden["attention, forward"] == pytest.approx(
        0
    )


def write(directory: Path, events: list[dict[str, Any]]) -> Path:
    path = directory / "profile" / "rank0.json.gz"
    path.parent.mkdir()
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    return path


def test_the_table_accounts_for_the_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write(tmp_path, two_steps())
    assert main(["profile", str(trace), "--kernels", "1"]) == 0
    out = capsys.readouterr().out
    assert "9.0 ms per step, mean of 2" in out and "FusedAdam" in out
    row = next(line.split() for line in out.splitlines() if "collectives" in line)
    assert row == ["collectives", "2.0", "0.0", "2.0", "22.2", "1.0", "1"]


def test_the_peak_of_the_memory_is_shown_by_what_it_was_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, gib = write(tmp_path, two_steps()), 2**30
    memory = {
        "parts": {"optimizer": 2 * gib, "stored_activations": 5 * gib},
        "peak": 7 * gib,
        "own": 8 * gib,
        "all": 9 * gib,
    }
    path.with_name("summary-rank0.json").write_text(json.dumps({"memory": memory}))
    assert main(["profile", str(tmp_path)]) == 0
    said = capsys.readouterr().out.partition("GPU memory, GiB")[2]
    assert re.findall(r"([a-z][a-z ]+[a-z])  +(\d\.\d\d)", said) == [
        ("stored activations", "5.00"), ("optimizer", "2.00"), ("peak of tensors", "7.00"),
        ("held by this process", "8.00"), ("held by all processes", "9.00"),
    ]  # fmt: skip


def test_a_trace_of_a_cpu_is_told_by_phase(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each step: 6 ms of forward, 4 ms of update; what gloo notes does not count."""
    events = []
    for i, begin in enumerate((0.0, 20.0)):
        events += [
            event(f"step {i + 4}", begin, 11, "user_annotation"),
            event("forward", begin, 6, "user_annotation"),
            event("gloo:recv", begin + 1, 9, "user_annotation"),
            event("aten::mm", begin + 4.5, 1, "cpu_op"),
            event("update", begin + 6, 4, "user_annotation"),
        ]
    write(tmp_path, [{"tid": 1, **each} for each in events])
    assert main(["profile", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "11.0 ms per step, mean of 2" in out and "hidden" not in out
    assert ["host", "6.0", "4.0", "10.0", "90.9"] in [s.split() for s in out.splitlines()]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda d: d, "does not exist; train with --profile_steps"),
        (lambda d: write(d, [event("aten::mm", 0, 1, "cpu_op")]), "the trace has no training step"),
        (lambda d: write(d, two_steps()).write_bytes(b"\x1f\x8bcut"), "is not a complete trace"),
    ],
)
def test_a_trace_that_cannot_be_used_is_one_clear_line(
    make: Any, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path)
    assert main(["profile", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err


def test_a_summary_has_what_is_drawn_of_a_trace() -> None:
    copy = event("Memcpy PtoP (Device -> Device)", 0.5, 0.5, "gpu_memcpy") | {"args": {"bytes": 2**20}}
    found = json.loads(json.dumps(summary([*two_steps(), copy])))
    assert (found["steps"], found["step_ms"]) == (2, 9.0)
    spent = {(each["kind"], each["phase"]): each["ms"] for each in found["spent"]}
    assert spent["attention, forward", "forward"] == 2 and spent["optimizer, norm, clip", "update"] == 4
    assert spent["collectives", "forward"] == 2, "the part that attention does not hide"
    assert found["kernels"][0] == {"name": "FusedAdam", "ms": 4.0}
    (moved,) = found["moved"]
    assert moved["kind"] == "copies from another GPU" and (moved["calls"], moved["bytes"]) == (0.5, 2**19)
    assert moved["gb_per_second"] == pytest.approx(2**20 / 0.5e-3 / 1e9)


# ---- data transfers -------------------------------------------------------------------------------------------------

MIB = 2**20


def copy(name: str, size: int, ms: float) -> dict[str, Any]:
    return {"cat": "gpu_memcpy", "name": f"Memcpy {name} (a -> b)", "dur": ms * 1e3, "args": {"bytes": size}}


def collective(name: str, inside: int, outside: int, ranks: int, ms: float, dtype: str = "Float") -> dict[str, Any]:
    about = {
        "Collective name": name, "In msg nelems": inside, "Out msg nelems": outside, "Group size": ranks, "dtype": dtype
    }  # fmt: skip
    return {"cat": "kernel", "name": "ncclDevKernel", "dur": ms * 1e3, "args": about}


def test_bytes_of_a_collective_are_those_that_cross_a_link() -> None:
    """Each of four ranks fetches or sends all but its own quarter, and does both in an all-reduce."""
    n = MIB // 4  # elements of a MiB in float32
    kinds = transfers_by_kind(
        [
            collective("_allgather_base", n, 4 * n, 4, 1.0),
            collective("_reduce_scatter_base", 4 * n, n, 4, 2.0),
            collective("allreduce", n, n, 4, 1.0),
            collective("_allgather_base", 2 * n, 8 * n, 4, 1.0, "BFloat16"),
            copy("PtoP", 8 * MIB, 2.0),
            copy("PtoP", 8 * MIB, 4.0),
            {"cat": "kernel", "name": "gemm", "dur": 5.0, "args": {}},
        ]
    )
    assert [(name, sum(kind.sizes) / MIB) for name, kind in kinds.items()] == [
        ("copies from another GPU", 16),
        ("all-gather, float, 4 ranks", 3),
        ("reduce-scatter, float, 4 ranks", 3),
        ("all-gather, bfloat16, 4 ranks", 3),
        ("all-reduce, float, 4 ranks", 1.5),
    ]
    assert kinds["reduce-scatter, float, 4 ranks"].rates == [pytest.approx(3 * MIB / 2e-3)]


def test_large_movements_have_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    times = {"ph": "X", "ts": 0.0}
    copies = [times | each for each in [copy("PtoP", 400 * MIB, 1.0), copy("HtoD", 64, 1.0)] * 2]
    write(tmp_path, [*two_steps(), *copies])
    assert main(["profile", str(tmp_path)]) == 0
    large, small = [line.split() for line in capsys.readouterr().out.splitlines() if "copies" in line]
    assert large[-5:] == ["1", "400", "400", "419", "419"] and small[-3:] == ["1", "0.00", "0.00"]
