"""Report of the error that ends a run, to the user and to torch's launcher."""

import json
import sys
import time
from contextlib import suppress

from lightseq.distributed.environment import launcher_error_file


def report_error(line: str, prints: bool = True, seconds_ago: float = 0.0) -> None:
    """Prints the error that ends a run, and writes it to the file in which torch's launcher looks for the root cause.

    The launcher picks the earliest failure, with a resolution of one second. `seconds_ago` is the age of this failure,
    and the rank that prints makes its own a second older. The first error written to the file stays. Ranks that do not
    print call this too, for the launcher of their own host.
    """
    if prints:
        print(f"error: {line}", file=sys.stderr, flush=True)
    path = launcher_error_file()
    if path.exists():
        return
    extra = {"timestamp": str(int(time.time() - seconds_ago - prints))}
    with suppress(OSError):
        partial = path.with_name(path.name + ".partial")
        partial.write_text(json.dumps({"message": {"message": f"error: {line}", "extraInfo": extra}}))
        partial.replace(path)
