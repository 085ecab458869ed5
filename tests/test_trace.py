"""Traces of steps: kinds of kernels, every millisecond by kind and phase, and bytes of transfers."""

import json
from typing import Any

import pytest
from analysis_files import copy, two_steps

from lightseq.profiling.trace import IDLE, KINDS, gpu_breakdown, kind_of, summary
from lightseq.profiling.transfers import transfers_by_kind

MIB = 2**20
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
    "_copy_to_rows": "experts' rows",
    "_sum_rows": "experts' rows",
    "Memcpy HtoD (Pinned -> Device)": "host copies",
    "void at::native::elementwise_kernel<128, 2>": "other kernels",
}


@pytest.mark.parametrize(("kernel", "kind"), KERNELS.items())
def test_a_kernel_has_a_kind_by_its_name(kernel: str, kind: str) -> None:
    assert KINDS[kind_of(kernel)][0] == kind


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


def test_a_summary_has_times_and_transfers_per_step() -> None:
    found = json.loads(json.dumps(summary([*two_steps(), copy("PtoP", MIB, 0.5)])))
    assert (found["steps"], found["step_ms"]) == (2, 9.0)
    spent = {(each["kind"], each["phase"]): each["ms"] for each in found["spent"]}
    assert spent["attention, forward", "forward"] == 2 and spent["optimizer, norm, clip", "update"] == 4
    assert spent["collectives", "forward"] == 2, "the part that attention does not hide"
    (moved,) = found["moved"]
    assert moved["kind"] == "copies from another GPU" and (moved["calls"], moved["bytes"]) == (0.5, MIB / 2)
    assert moved["gb_per_second"] == pytest.approx(MIB / 0.5e-3 / 1e9)


def collective(name: str, inside: int, outside: int, ranks: int, ms: float, dtype: str = "Float") -> dict[str, Any]:
    about = {
        "Collective name": name, "In msg nelems": inside, "Out msg nelems": outside, "Group size": ranks, "dtype": dtype
    }  # fmt: skip
    return {"cat": "kernel", "name": "ncclDevKernel", "dur": ms * 1e3, "args": about}


def test_a_collective_counts_the_bytes_that_cross_a_link() -> None:
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
