"""Settings of a Python process that lightseq changes for a while: loggers and garbage collection."""

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager

# transformers imports torchao if it is installed. On every rank torchao then logs the kernels that it cannot load, and
# torch logs how torchao declares its types. A missing feature that a flag needs is an error anyway.
# The compiler warns about in-place operations under checkpoint policies; our layers have none. peft imports
# bitsandbytes, which then misses its own kernels for CPUs.
NOISY_LOGGERS = ("torchao", "torch.utils._pytree", "torch._higher_order_ops.wrap", "bitsandbytes.backends.cpu.ops")


def silence_loggers() -> None:
    """Limits NOISY_LOGGERS to errors, for processes that lightseq starts."""
    for name in NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)


@contextmanager
def silenced_loggers() -> Iterator[None]:
    """Limits NOISY_LOGGERS to errors inside the block, for a user's own process."""
    levels = {name: logging.getLogger(name).level for name in NOISY_LOGGERS}
    silence_loggers()
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


@contextmanager
def without_collection() -> Iterator[None]:
    """Turns garbage collection off inside the block. It takes an eighth of the time of imports."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
