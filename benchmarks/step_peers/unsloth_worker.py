"""The peer `unsloth` as a program: worker.py after an import of unsloth, which patches packages imported after it."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(
        Path(__file__).resolve().parent.parent.parent
    )  # instead of this folder, whose modules would hide packages

    import unsloth  # noqa: F401

    from benchmarks.step_peers.worker import main

    main(sys.argv[1:])
