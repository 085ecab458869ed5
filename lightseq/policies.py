"""The names of what the backward pass recomputes, as `--remat` takes them."""

from typing import Final

KEEP_MLP: Final = "attention+mlp"  # neither attention nor gate and up of the MLP
POLICIES: Final = ("none", KEEP_MLP, "attention", "full")
