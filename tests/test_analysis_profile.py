"""Every millisecond of a traced step under one name: kinds, phases, what is hidden and what is not."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from analysis import __main__ as analysis
from lightseq.profiling.host_trace import host_breakdown
from lightseq.profiling.trace import IDLE, KINDS, gpu_breakdown, kind_of, read_trace, summary

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


def test_the_table_says_where_the_time_went(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, two_steps())
    assert analysis.main(["profile", str(tmp_path), "--kernels", "1"]) == 0
    out = capsys.readouterr().out
    assert "9.0 ms a step, mean of 2" in out and "FusedAdam" in out
    row = next(line.split() for line in out.splitlines() if "collectives" in line)
    assert row == ["collectives", "2.0", "0.0", "2.0", "22.2", "1.0", "1"]


def test_the_peak_of_the_memory_is_shown_by_what_it_was_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, gib = write(tmp_path, two_steps()), 2**30
    memory = {
        "parts": {"optimizer": 2 * gib, "kept_activations": 5 * gib},
        "peak": 7 * gib,
        "own": 8 * gib,
        "all": 9 * gib,
    }
    path.with_name("summary-rank0.json").write_text(json.dumps({"memory": memory}))
    assert analysis.main(["profile", str(tmp_path)]) == 0
    said = capsys.readouterr().out.partition("memory of the GPU, GiB")[2]
    assert re.findall(r"([a-z][a-z ]+[a-z])  +(\d\.\d\d)", said) == [
        ("kept activations", "5.00"), ("optimizer", "2.00"), ("peak of tensors", "7.00"),
        ("held by this process", "8.00"), ("held by all processes", "9.00"),
    ]  # fmt: skip


def on_the_host() -> list[dict[str, Any]]:
    """Each step: 6 ms of forward, 4 ms of update; another thread's work and what gloo notes do not count."""
    events = [event("aten::mm", 0, 50, "cpu_op") | {"tid": 2}]
    for i, begin in enumerate((0.0, 20.0)):
        events += [
            event(f"step {i + 4}", begin, 11, "user_annotation"),
            event("forward", begin, 6, "user_annotation"),
            event("gloo:recv", begin + 1, 9, "user_annotation"),
            event("lightseq::attention", begin, 4, "cpu_op"),  # waits for 1 ms between its operators
            event("c10d::recv_", begin, 1, "cpu_op"),
            event("aten::_scaled_dot_product_flash_attention_for_cpu", begin + 1, 2, "cpu_op"),
            event("aten::linear", begin + 4, 1.5, "cpu_op"),
            event("aten::mm", begin + 4.5, 1, "cpu_op"),
            event("update", begin + 6, 4, "user_annotation"),
            event("Optimizer.step#AdamW.step", begin + 6, 3, "user_annotation"),
        ]
    return [{"tid": 1, **each} for each in events]


def test_a_trace_of_a_cpu_counts_every_millisecond_of_the_thread_that_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    account = host_breakdown(on_the_host())
    assert (account.steps, account.step_ms) == (2, pytest.approx(11))
    assert {key: pytest.approx(ms) for key, ms in account.spent.items()} == {
        ("attention's exchange", "forward"): 2,
        ("attention, forward", "forward"): 2,
        ("matrix products", "forward"): 1,
        ("other operators", "forward"): 0.5,
        (IDLE, "forward"): 0.5,
        ("optimizer, norm, clip", "update"): 4,
        (IDLE, ""): 1,
    }
    assert account.launches["matrix products"] == 2 and account.names["aten::mm"] == pytest.approx(1)
    write(tmp_path, on_the_host())
    assert analysis.main(["profile", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "11.0 ms a step, mean of 2" in out and "hidden" not in out
    assert ["Python", "between", "operators", "0.5", "0.0", "1.0", "1.5", "13.6"] in [
        s.split() for s in out.splitlines()
    ]
    assert analysis.main(["profile", str(tmp_path), "--timeline"]) == 2
    assert "holds nothing that ran on a GPU, which --timeline draws" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda d: d, "is not there; train with --profile_steps"),
        (lambda d: write(d, [event("aten::mm", 0, 1, "cpu_op")]), "the trace holds no step of training"),
        (lambda d: write(d, two_steps()).write_bytes(b"\x1f\x8bcut"), "is no whole trace"),
    ],
)
def test_a_trace_that_cannot_be_used_is_one_clear_line(
    make: Any, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path)
    assert analysis.main(["profile", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err


def test_a_trace_may_be_named_itself(tmp_path: Path) -> None:
    assert read_trace(write(tmp_path, two_steps()))


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
