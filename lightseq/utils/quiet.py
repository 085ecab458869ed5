"""Loggers of transformers, torchao and torch whose messages a user cannot act on, and how to silence them."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

# transformers imports torchao if it is installed. torchao then logs, on every rank, kernels that this machine cannot
# load, and torch logs how torchao declares its types. Features that a flag asks for are refused with an error instead.
# The compiler warns about in-place operations under checkpoint policies; layers have none.
NOISY_LOGGERS = ("torchao", "torch.utils._pytree", "torch._higher_order_ops.wrap")


def silence_loggers() -> None:
    """Lets these loggers report only errors. For processes that lightseq starts."""
    for name in NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)


@contextmanager
def silenced_loggers() -> Iterator[None]:
    """Silences these loggers inside the block. For a user's own process."""
    levels = {name: logging.getLogger(name).level for name in NOISY_LOGGERS}
    silence_loggers()
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
