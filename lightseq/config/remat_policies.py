"""Values of --remat, from least to most recomputation."""

from typing import Final

STORE_MLP: Final = "attention+mlp"  # stores attention and the MLP's gate and up
STORE_LINEARS: Final = "attention+linears"  # also stores the outputs of all other linear layers
STORES_MLP: Final = (STORE_MLP, STORE_LINEARS)
POLICIES: Final = ("none", STORE_LINEARS, STORE_MLP, "attention", "full")


def may_keep_gathered(policy: str) -> bool:
    """Returns whether attention may store gathered q, k and v for its backward pass.

    A recomputed layer makes q, k and v again and would then hold both copies.
    """
    return policy == "none"
