"""An object whose pickle runs a command."""

import os
from pathlib import Path
from typing import Any


class Hostile:
    """Unpickled by an unrestricted reader, this makes a file."""

    def __init__(self, trap: Path) -> None:
        self.trap = trap

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.trap}",)
