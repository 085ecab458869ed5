"""Delta rules with one decay for each head, with the Triton and TileLang kernels of flash-linear-attention, on GPUs."""

from collections.abc import Sequence

from fla.ops.common.chunk_o import chunk_bwd_dqkwg, chunk_bwd_dv_local, chunk_fwd_o
from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_intra
from fla.ops.gated_delta_rule.wy_fast import prepare_wy_repr_bwd
from torch import Tensor

from lightseq.kernels.recurrent.base import ScanInputs, Summary
from lightseq.kernels.recurrent.fla_pass import DeltaStates, FlaPass


class _Pass(FlaPass):
    """Inputs, and the triangular system of every chunk."""

    def __init__(self, x: ScanInputs, scale: float, edges: Sequence[int]) -> None:
        super().__init__(x, scale, edges)
        assert x.beta is not None
        self._beta = self._flat(x.beta)
        self._w, self._u, self._solved = chunk_gated_delta_rule_fwd_intra(
            k=self._k, v=self._v, g=self._g, beta=self._beta, **self._of_segments
        )
        self._states = DeltaStates(self._k, self._w, {"g": self._g}, self._of_segments)


class _Forward(_Pass):
    def summarize(self) -> Summary:
        return Summary(*map(self._by_row, self._states.summarize(self._u)))

    def run(self, states: Tensor | None) -> Tensor:
        h, v_new, _ = self._states.forward(self._u, self._flat_states(states), values=True)
        out = chunk_fwd_o(q=self._q, k=self._k, v=v_new, h=h, g=self._g, scale=self._scale, **self._of_segments)
        return self._output(out)


class _Backward(_Pass):
    def __init__(self, x: ScanInputs, scale: float, edges: Sequence[int], states: Tensor | None, dout: Tensor) -> None:
        super().__init__(x, scale, edges)
        self._initial, self._dout = self._flat_states(states), self._flat(dout.to(x.k.dtype))
        self._dv = chunk_bwd_dv_local(q=self._q, k=self._k, g=self._g, do=self._dout, scale=scale, **self._of_segments)

    def _state_gradients(self, dfinal: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        return self._states.backward(self._q, self._dout, self._dv, self._initial, dfinal, self._scale)

    def initial_gradients(self) -> Tensor:
        assert self._initial is not None
        return self._by_row(self._state_gradients(None)[1])

    def run(self, dfinal: Tensor | None) -> ScanInputs:
        h, v_new, _ = self._states.forward(self._u, self._initial, values=True)
        dh, _, dv = self._state_gradients(self._flat_states(dfinal))
        del self._u, self._dv  # a pass takes much memory, and these are as large as the values
        dq, dk, dw, dg = chunk_bwd_dqkwg(
            q=self._q, k=self._k, v=v_new, w=self._w, g=self._g, h=h, dv=dv, do=self._dout, dh=dh, scale=self._scale,
            **self._of_segments,
        )  # fmt: skip
        del h, dh, v_new
        dk_solved, dv, dbeta, dg_solved = prepare_wy_repr_bwd(
            k=self._k, v=self._v, beta=self._beta, g=self._g, A=self._solved, dw=dw, du=dv, **self._of_segments
        )
        return self._gradients(dq, dk.add_(dk_solved), dv, dg.add_(dg_solved), dbeta)


class FlaDeltaScan:
    """Kernel for delta rules with one decay for each head, in float16 or bfloat16."""

    forward, backward = _Forward, _Backward
