"""The names of what the backward pass recomputes, as `--remat` takes them."""

from typing import Final

STORE_MLP: Final = "attention+mlp"  # neither attention nor gate and up of the MLP
STORE_LINEARS: Final = "attention+linears"  # nor any other linear: norms, rotations and activations alone
STORES_MLP: Final = (STORE_MLP, STORE_LINEARS)
POLICIES: Final = ("none", STORE_LINEARS, STORE_MLP, "attention", "full")


def keeps_gathered(policy: str) -> bool:
    """Returns whether attention may keep gathered q, k and v for its backward pass.

    A layer that is recomputed has its own q, k and v again, and would hold both.
    """
    return policy == "none"
