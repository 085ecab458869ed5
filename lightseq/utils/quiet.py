"""Silences log lines of transformers, torchao and torch that a user cannot act on."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

# transformers imports torchao wherever it is installed, and torchao complains of kernels that this machine cannot load
# (torch of how it declares its types), on every rank. What is asked of torchao and cannot be had is refused in words.
# The compiler asks of every checkpoint with a policy that nothing in it works in place: nothing does in a layer.
NOISY = ("torchao", "torch.utils._pytree", "torch._higher_order_ops.wrap")


def silence_loggers() -> None:
    """Lets only errors of these loggers through. For processes that lightseq starts."""
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)


@contextmanager
def silenced_loggers() -> Iterator[None]:
    """Silences them inside the block. For processes of the user's own."""
    levels = {name: logging.getLogger(name).level for name in NOISY}
    silence_loggers()
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
