"""The update of TRL's AsyncGRPOTrainer on rollouts that begin alike: TRL's row of a trie, its attention and its head.

The trainer takes FlashAttention-3 from the hub. Here its attention calls the same function of FlashAttention-4, and on
CPUs a plain one. As by TRL's defaults, layers are recomputed whole, and products are in bfloat16 under autocast.
"""

from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from trl.experimental.async_grpo import packing
from trl.trainer.utils import add_fused_lm_head

from benchmarks.step_peers.peer import Job, StepOutcome


class TreeUpdate:
    """Policy gradient on rows with an advantage each, whose first `prompt` tokens are no targets."""

    def __init__(self, job: Job) -> None:
        packing.register_tree_attention()
        packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=fa4 if job.on_gpu else plain_attention)
        model: Any = job.whole_model()
        model.set_attn_implementation(packing.TREE_ATTENTION)
        add_fused_lm_head(model, outputs=("log_probs", "entropy"))
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if job.lora:
            rank = job.lora.rank
            model = get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))
            model.enable_input_require_grads()
        self._job, self._model = job, model.train()
        self._optimizer = job.adamw(model)

    def batch(self, rows: Sequence[list[int]], prompt: int, advantages: Tensor) -> dict[str, Any]:
        """Returns the row that TRL packs, on the device."""
        tree = packing.TreeRow()
        for row, advantage in zip(rows, advantages.tolist(), strict=True):
            mask = torch.arange(len(row)) >= prompt
            sample = {"input_ids": torch.tensor(row), "completion_mask": mask.long(), "group_id": 0}
            tree.add({**sample, "old_log_probs": torch.zeros(len(row)), "advantage": advantage})
        packed = tree.pack()
        longest = packed.pop("tree_max_seqlens").tolist()
        found: dict[str, Any] = {name: x.to(self._job.world.device) for name, x in packed.items()}
        return found | dict(zip(("tree_max_seqlen_q", "tree_max_seqlen_k"), longest, strict=True))

    def __call__(self, batch: dict[str, Any], _step: int = 0) -> StepOutcome:
        tree = {name: x for name, x in batch.items() if name.startswith("tree_")}
        with torch.autocast(self._job.world.device.type, torch.bfloat16, enabled=self._job.on_gpu):
            out = self._model(
                input_ids=batch["input_ids"][None],
                position_ids=batch["position_ids"][None],
                shift_labels=batch["shift_labels"][None],
                fused_lm_head=True,
                use_cache=False,
                **tree,
            )
        log_probs = out.log_probs.flatten()[batch["token_index"]]
        loss = -(batch["advantages"] * log_probs).sum() / len(batch["token_index"])
        loss.backward()
        trained = [x for x in self._model.parameters() if x.requires_grad]
        norm = nn.utils.clip_grad_norm_(trained, torch.inf)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return StepOutcome(loss.detach(), norm)


LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


def fa4(q: Tensor, k: Tensor, v: Tensor, *lengths: Any, window_size: tuple[int, int], **options: Any) -> Any:
    """Calls FlashAttention-4 with the arguments of FlashAttention-3; `lengths` are those of LENGTHS."""
    from flash_attn.cute import flash_attn_varlen_func

    window = tuple(None if side < 0 else side for side in window_size)
    return flash_attn_varlen_func(q, k, v, **dict(zip(LENGTHS, lengths, strict=True)), window_size=window, **options)


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, *lengths: Any, softmax_scale: float | None, **options: Any
) -> Tensor:
    """Computes the same attention segment by segment; the last query of a segment sees its last key."""
    assert options == {"causal": True, "window_size": (-1, -1)}
    edges_q, edges_k, *_ = lengths
    parts = []
    for (a, b), (c, d) in zip(pairwise(edges_q.tolist()), pairwise(edges_k.tolist()), strict=True):
        mask = torch.ones(b - a, d - c, dtype=torch.bool, device=q.device).tril(d - c - (b - a))
        query, key, value = (x[None].transpose(1, 2) for x in (q[a:b], k[c:d], v[c:d]))
        out = nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=softmax_scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        parts.append(out.transpose(1, 2)[0])
    return torch.cat(parts)
