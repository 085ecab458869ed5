"""Python looks for cycles of objects on all ranks at once, between steps: one that does so by itself makes all wait."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STEPS = 50  # between two collections; a step leaves some hundred objects in cycles, no tensor among them


def _collect(step: int) -> None:
    if step % STEPS == 0:
        gc.collect()


@contextmanager
def collected_together() -> Iterator[Callable[[int], None]]:
    """Within it nothing is collected but by the function that it gives, which is called after every step.

    What is there at the beginning, a model's modules among it, is not looked through again.
    """
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield _collect
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
