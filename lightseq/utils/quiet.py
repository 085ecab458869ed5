"""Loggers of transformers, torchao and torch whose messages a user cannot act on, and how to silence them."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

# transformers imports torchao wherever it is installed, and torchao complains of kernels that this machine cannot load
# (torch of how it declares its types), on every rank. What is asked of torchao and cannot be had is refused in words.
# The compiler asks of every checkpoint with a policy that nothing in it works in place: nothing does in a layer.
NOISY = ("torchao", "torch.utils._pytree", "torch._higher_order_ops.wrap")


def silence_loggers() -> None:
    """Lets these loggers report only errors. For processes that lightseq starts."""
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)


@contextmanager
def silenced_loggers() -> Iterator[None]:
    """Silences these loggers inside the block. For a user's own process."""
    levels = {name: logging.getLogger(name).level for name in NOISY}
    silence_loggers()
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
