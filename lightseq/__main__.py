"""Runs `python3 -m lightseq`."""

import signal
import sys

from lightseq.cli import main

if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader such as head may have seen enough
    sys.exit(main())
