"""Kimi Delta Attention, whose decay is one for each channel, with flash-linear-attention's kernels, on GPUs."""

from collections.abc import Sequence

from fla.ops.gla.chunk import chunk_gla_fwd_o_gk
from fla.ops.kda.chunk_bwd import chunk_kda_bwd_dAv, chunk_kda_bwd_wy_dqkg_fused
from fla.ops.kda.chunk_intra import chunk_kda_bwd_intra, chunk_kda_fwd_intra
from torch import Tensor

from lightseq.kernels.recurrent.base import ScanInputs, Summary
from lightseq.kernels.recurrent.fla_pass import DeltaStates, FlaPass


class _Pass(FlaPass):
    """Inputs, and the products of queries and keys in every chunk.

    `safe_gate` stays off: it is for decays with a lower bound, which those of Kimi Linear do not have.
    """

    def __init__(self, x: ScanInputs, scale: float, edges: Sequence[int], is_backward: bool = False) -> None:
        super().__init__(x, scale, edges)
        assert x.beta is not None
        self._beta = self._flat(x.beta)
        w, self._u, self._q_decayed, k_ahead, self._within, self._solved = chunk_kda_fwd_intra(
            q=self._q, k=self._k, v=self._v, gk=self._g, beta=self._beta, scale=scale, safe_gate=False,
            disable_recompute=is_backward,  # then it returns queries times their decay
            **self._of_segments,
        )  # fmt: skip
        self._states = DeltaStates(k_ahead, w, {"gk": self._g}, self._of_segments)


class _Forward(_Pass):
    def summarize(self) -> Summary:
        return Summary(*map(self._by_row, self._states.summarize(self._u)))

    def run(self, states: Tensor | None) -> Tensor:
        h, v_new, _ = self._states.forward(self._u, self._flat_states(states), values=True)
        out = chunk_gla_fwd_o_gk(
            q=self._q, v=v_new, g=self._g, A=self._within, h=h, scale=self._scale, **self._of_segments
        )
        return self._output(out)


class _Backward(_Pass):
    def __init__(self, x: ScanInputs, scale: float, edges: Sequence[int], states: Tensor | None, dout: Tensor) -> None:
        super().__init__(x, scale, edges, is_backward=True)
        self._initial, self._dout = self._flat_states(states), self._flat(dout.to(x.k.dtype))
        self._h, self._v_new, _ = self._states.forward(self._u, self._initial, values=True)
        self._dwithin, self._dv = chunk_kda_bwd_dAv(
            q=self._q, k=self._k, v=self._v_new, do=self._dout, A=self._within, scale=scale, **self._of_segments
        )
        del self._u, self._within  # a pass takes much memory

    def _state_gradients(self, dfinal: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        return self._states.backward(self._q_decayed, self._dout, self._dv, self._initial, dfinal, self._scale)

    def initial_gradients(self) -> Tensor:
        assert self._initial is not None
        return self._by_row(self._state_gradients(None)[1])

    def run(self, dfinal: Tensor | None) -> ScanInputs:
        dh, _, dv = self._state_gradients(self._flat_states(dfinal))
        del self._dv, self._q_decayed, self._states
        dq, dk, dv, dbeta, dg, dsolved = chunk_kda_bwd_wy_dqkg_fused(
            q=self._q, k=self._k, v=self._v, v_new=self._v_new, g=self._g, beta=self._beta, A=self._solved, h=self._h,
            do=self._dout, dh=dh, dv=dv, scale=self._scale, **self._of_segments,
        )  # fmt: skip
        del dh, self._h, self._v_new, self._solved
        dq, dk, dbeta, dg = chunk_kda_bwd_intra(
            q=self._q, k=self._k, g=self._g, beta=self._beta, dAqk=self._dwithin, dAkk=dsolved, dq=dq, dk=dk,
            db=dbeta, dg=dg, safe_gate=False, **self._of_segments,
        )  # fmt: skip
        return self._gradients(self._by_group(dq), self._by_group(dk), dv, dg, dbeta)

    def _by_group(self, gradient: Tensor) -> Tensor:
        """Sums the gradients (1, B x S, H, K), in float32, over the heads of values that share a query and key."""
        groups = self._k.shape[2]
        return gradient if gradient.shape[2] == groups else gradient.unflatten(2, (groups, -1)).sum(3)


class FlaKimiScan:
    """Kernel for delta rules with a decay for each channel, in float16 or bfloat16."""

    forward, backward = _Forward, _Backward
