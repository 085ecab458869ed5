"""End of torch.compile's worker processes, for which torch may wait minutes when a process exits."""

import subprocess
import sys
import threading

SECONDS = 10.0  # a pool of 32 workers takes 3


def end_compile_workers() -> None:
    """Ends torch.compile's worker processes, and kills them after SECONDS.

    Before torch 2.13 the pool may hang after a first compilation, and torch waits 300 seconds for it at exit
    (pytorch issue 162199).
    """
    compiler = sys.modules.get("torch._inductor.async_compile")
    if compiler is None:  # nothing was compiled
        return
    processes = [getattr(pool, "process", None) for pool in getattr(compiler, "_pool_set", ())]
    ending = threading.Thread(target=compiler.shutdown_compile_workers, name="end of compile workers", daemon=True)
    ending.start()
    ending.join(SECONDS)
    if not ending.is_alive():
        return
    for process in processes:
        if isinstance(process, subprocess.Popen):
            process.kill()  # its workers notice and end themselves
    ending.join(SECONDS)
