"""Attention for models of one's own: the example and packed documents equal plain torch, without transformers."""

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from worlds import spawn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import plain_torch  # noqa: E402

from lightseq import sequence_parallel  # noqa: E402
from lightseq.distributed.world import World  # noqa: E402

HEADS, KV_HEADS, DIM, BOUNDARIES = 4, 2, 8, (0, 13, 14, 50)


def losses(rank: int, size: int) -> list[float]:
    return plain_torch.train(World(rank, size, rank, size, torch.device("cpu")))


def whole_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """torch's own attention to whole sequences (batch, length, heads, dim)."""
    places = torch.arange(q.shape[1])
    behind = places[:, None] - places
    mask = (behind >= 0) & (behind < (window or len(places)))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(1, 2)


def losses_of_plain_torch(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The example on whole sequences, with torch's attention in place of lightseq's lines."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.distributed, "all_reduce", lambda x: None)
        patch.setattr(sequence_parallel, "make_group", lambda **_: None)
        patch.setattr(sequence_parallel, "shard", lambda group, x, fill=0: x)
        patch.setattr(sequence_parallel, "positions", lambda group, length, device: torch.arange(length)[None])
        patch.setattr(sequence_parallel, "attention", lambda q, k, v, group: whole_attention(q, k, v, None))
        return losses(0, 1)


def test_the_example_equals_plain_torch_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = losses_of_plain_torch(monkeypatch)
    assert wanted[-1] < wanted[0] - 0.3
    for world in (1, 2, 3):
        for found in spawn(world, losses, world):
            assert found == pytest.approx(wanted, abs=1e-5)


def packed(rank: int, window: int | None) -> None:
    group = sequence_parallel.make_group(
        heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, length=64, dtype=torch.float64, device="cpu",
        schedule="prefix", packed=True, windows=window is not None,
    )  # fmt: skip
    documents = sequence_parallel.pack(group, BOUNDARIES)
    torch.manual_seed(0)
    whole = [torch.randn(1, BOUNDARIES[-1], n, DIM, dtype=torch.float64) for n in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    q, k, v, dout = (sequence_parallel.shard(group, x, documents=documents) for x in whole)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = sequence_parallel.attention(q, k, v, group, documents=documents, window=window)
    out.backward(dout)
    alone = [x.clone().requires_grad_() for x in whole[:3]]
    parts = [whole_attention(*(x[:, first:end] for x in alone), window) for first, end in pairwise(BOUNDARIES)]
    wanted = torch.cat(parts, 1)
    wanted.backward(whole[3])
    real = sequence_parallel.shard(group, torch.ones(1, BOUNDARIES[-1], dtype=torch.bool), documents=documents)[0]
    for got, want in ((out, wanted), *((x.grad, y.grad) for x, y in zip((q, k, v), alone, strict=True))):
        expected = sequence_parallel.shard(group, want, documents=documents)
        torch.testing.assert_close(got[:, real], expected[:, real], rtol=0, atol=1e-12)
    starts = sequence_parallel.positions(group, BOUNDARIES[-1], documents)[0][real]
    assert (starts == 0).sum() <= len(BOUNDARIES) - 1 and starts.max() < 36
    sequence_parallel.release(group)


@pytest.mark.parametrize("window", [None, 5])
def test_packed_documents_and_windows_equal_each_document_alone(window: int | None) -> None:
    for world in (1, 3):
        spawn(world, packed, window)


def test_it_loads_without_transformers_and_the_flags() -> None:
    others = "{'transformers', 'lightseq.config.train_config'}"
    code = f"import sys; from lightseq import sequence_parallel; assert not {others} & sys.modules.keys()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_wrong_requests_are_one_line(alone: None) -> None:
    with pytest.raises(TypeError, match="no option shedule; did you mean schedule"):
        sequence_parallel.make_group(heads=4, head_dim=8, length=64, shedule="prefix")
    with pytest.raises(ValueError, match="schedule 'no' is unknown; choose auto or one of"):
        sequence_parallel.make_group(heads=4, head_dim=8, length=64, dtype=torch.float32, schedule="no")
