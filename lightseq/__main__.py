"""Entry point of `lightseq` and `python3 -m lightseq`."""

import signal
import sys

from lightseq.cli import main
from lightseq.distributed.environment import is_main_process
from lightseq.distributed.rank_launcher import INTERRUPTED


def run() -> int:
    """Runs the command line. Returns its exit status."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader such as `head` may close the pipe early
    try:
        return main()
    except KeyboardInterrupt:
        if is_main_process():
            print("\ninterrupted", file=sys.stderr, flush=True)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(run())
