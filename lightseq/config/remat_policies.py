"""The names of what the backward pass recomputes, as `--remat` takes them."""

from typing import Final

STORE_MLP: Final = "attention+mlp"  # neither attention nor gate and up of the MLP
STORE_LINEARS: Final = "attention+linears"  # nor any other linear: norms, rotations and activations alone
STORES_MLP: Final = (STORE_MLP, STORE_LINEARS)
POLICIES: Final = ("none", STORE_LINEARS, STORE_MLP, "attention", "full")


def keeps_gathered(policy: str) -> bool:
    """Whether attention may hand what it gathered to its backward pass, in the place of q, k and v.

    A layer that runs again has those anyway, and would hold both.
    """
    return policy == "none"
