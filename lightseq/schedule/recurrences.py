"""Names of linear recurrences, and of the ways in which they span the ranks of a sequence."""

from collections.abc import Mapping
from typing import Final

DELTA_RULE: Final = "gated delta rule"
KIMI: Final = "Kimi Delta Attention"
MAMBA: Final = "Mamba 2"

AUTO: Final = "auto"
CHAIN: Final = "chain"
HEADS: Final = "heads"
# Values of --recurrent_schedule, and what the start of a run says of them.
RECURRENT_SCHEDULES: Final[Mapping[str, str]] = {
    AUTO: "states in a chain",
    CHAIN: "states in a chain",
    HEADS: "heads exchanged",
}
