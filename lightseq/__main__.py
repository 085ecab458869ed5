"""The command `lightseq`, also as `python3 -m lightseq`."""

import signal
import sys

from lightseq.cli import main


def run() -> int:
    """Runs the command line. Returns its exit status."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader such as head may have seen enough
    return main()


if __name__ == "__main__":
    sys.exit(run())
