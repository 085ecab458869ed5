"""Interface of the kernels of linear recurrences.

The recurrence of a head, with a state S (K x V), a decay a_t = exp(g_t) and S_0 the initial state:

    S_t = a_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T      (gated delta rule, arXiv 2412.06464)
    S_t = a_t S_{t-1} + k_t v_t^T                                     (without beta: Mamba 2, arXiv 2405.21060)
    o_t = scale S_t^T q_t

The decay of a head is one number for each token, or one for each of its K channels (Kimi Delta Attention, arXiv
2510.26692). A run of tokens maps its initial state to its final one: S_T = M S_0 + b. M is the transition.

Shape suffixes: B batch, S tokens, H heads of values, G heads of queries and keys (H is a multiple), K, V, N segments.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from torch import Tensor

CHUNK: Final = 64  # tokens that kernels turn into matrix products at a time


class ScanInputs(NamedTuple):
    """Inputs of a recurrence, or their gradients. Operators over ranks take these fields (recurrent/operators.py)."""

    q: Tensor  # (B, S, G, K)
    k: Tensor  # (B, S, G, K)
    v: Tensor  # (B, S, H, V)
    g: Tensor  # (B, S, H) or (B, S, H, K), float32 or wider, at most 0
    beta: Tensor | None = None  # (B, S, H)


class Summary(NamedTuple):
    """Effect of a run of tokens on a state, in float32 or wider: S_T = M S_0 + b."""

    transition: Tensor  # M (B, N, H, K, K), or (B, N, H, K or 1, 1) where it only scales the rows of a state
    state: Tensor  # b (B, N, H, K, V): the final state after an initial state of zeros


def transition_size(x: ScanInputs) -> tuple[int, int]:
    """Returns the shape of a transition: (K, K), or (K, 1) if it only scales rows of a state."""
    keys = x.k.shape[-1]
    if x.beta is not None:
        return keys, keys
    return (keys if x.g.ndim == 4 else 1), 1


class ForwardScan(Protocol):
    """A recurrence over segments, in two steps, so that the initial states may depend on the summaries."""

    def summarize(self) -> Summary:
        """Returns the summary of every segment."""

    def run(self, states: Tensor | None) -> Tensor:
        """Returns the outputs (B, S, H, V) from the segments' initial states (B, N, H, K, V); None: zeros."""


class BackwardScan(Protocol):
    """The backward pass over segments, in two steps, so that final gradients may depend on initial ones."""

    def initial_gradients(self) -> Tensor:
        """Returns the gradients of the initial states (B, N, H, K, V) for zero gradients of the final states."""

    def run(self, dfinal: Tensor | None) -> ScanInputs:
        """Returns the gradients of the inputs from the final states' gradients (B, N, H, K, V); None: zeros."""


class ScanKernel(Protocol):
    """Computes a recurrence. Segments lie side by side: segment n has the tokens from `edges[n]` to `edges[n + 1]`."""

    def forward(self, x: ScanInputs, scale: float, edges: Sequence[int]) -> ForwardScan: ...

    def backward(
        self, x: ScanInputs, scale: float, edges: Sequence[int], states: Tensor | None, dout: Tensor
    ) -> BackwardScan: ...
