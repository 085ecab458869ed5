"""Ways in which recurrences span the ranks of a sequence."""

from collections.abc import Mapping
from typing import Final

AUTO: Final = "auto"
CHAIN: Final = "chain"
HEADS: Final = "heads"
# Values of --recurrent_schedule, and their descriptions at the start of a run.
RECURRENT_SCHEDULES: Final[Mapping[str, str]] = {
    AUTO: "states in a chain",
    CHAIN: "states in a chain",
    HEADS: "heads exchanged",
}
