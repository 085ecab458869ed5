"""What moved in traced steps: bytes that crossed a link, by kind, and how fast."""

from typing import Any

import pytest
from rich.console import Console

from analysis.traffic import table
from lightseq.profiling.traffic import transfers_by_kind

MIB = 2**20


def copy(name: str, size: int, ms: float) -> dict[str, Any]:
    return {"cat": "gpu_memcpy", "name": f"Memcpy {name} (a -> b)", "dur": ms * 1e3, "args": {"bytes": size}}


def collective(name: str, inside: int, outside: int, ranks: int, ms: float, dtype: str = "Float") -> dict[str, Any]:
    about = {
        "Collective name": name, "In msg nelems": inside, "Out msg nelems": outside, "Group size": ranks, "dtype": dtype
    }  # fmt: skip
    return {"cat": "kernel", "name": "ncclDevKernel", "dur": ms * 1e3, "args": about}


def test_bytes_of_a_collective_are_those_that_cross_a_link() -> None:
    """Of four ranks: all but its own quarter is fetched or sent, under all-reduce both."""
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


def test_the_table_has_rates_where_something_large_moved() -> None:
    console = Console(width=80)
    with console.capture() as caught:
        console.print(table(transfers_by_kind([copy("PtoP", 400 * MIB, 1.0), copy("HtoD", 64, 1.0)] * 2), steps=2))
    large, small = [line.split() for line in caught.get().splitlines() if line.startswith(" copies")]
    assert large[-5:] == ["1", "400", "400", "419", "419"] and small[-3:] == ["1", "0.00", "0.00"]
