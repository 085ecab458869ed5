"""The names of what the backward pass recomputes, as `--remat` takes them."""

from typing import Final

KEEP_MLP: Final = "attention+mlp"  # neither attention nor gate and up of the MLP
KEEP_LINEARS: Final = "attention+linears"  # nor any other linear: norms, rotations and activations alone
KEEPING_MLP: Final = (KEEP_MLP, KEEP_LINEARS)
POLICIES: Final = ("none", KEEP_LINEARS, KEEP_MLP, "attention", "full")
