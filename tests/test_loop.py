"""Cycles of objects are looked for between steps, on every rank after the same ones, and never in one."""

import gc
import os
import subprocess
import sys
import weakref

import pytest

from lightseq.training.loop import COLLECT_STEPS, synchronized_gc


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_collected_every_few_steps_and_gc_is_restored(enabled: bool) -> None:
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with synchronized_gc() as collect:
            gone = weakref.ref(Cycle())
            for step in range(1, COLLECT_STEPS + 1):
                assert gone() is not None and not gc.isenabled()
                for _ in range(1000):  # would have Python look for them
                    Cycle()
                collect(step)
            assert gone() is None and gc.get_freeze_count() > 0
        assert gc.isenabled() == enabled and gc.get_freeze_count() == 0
    finally:
        (gc.enable if before else gc.disable)()


SETTINGS = {"OMP_WAIT_POLICY": "PASSIVE", "TORCH_CPP_LOG_LEVEL": "ERROR"}


@pytest.mark.parametrize("given", [{}, {"OMP_WAIT_POLICY": "ACTIVE"}, {"TORCH_CPP_LOG_LEVEL": "INFO"}])
def test_waiting_threads_sleep_and_warnings_in_c_plus_plus_are_off_unless_asked_for(given: dict[str, str]) -> None:
    code = """from lightseq.distributed.environment import set_up_process
import os, sys
set_up_process()
assert "torch" not in sys.modules  # which reads them
print(os.environ["OMP_WAIT_POLICY"], os.environ["TORCH_CPP_LOG_LEVEL"])"""
    environment = {name: value for name, value in os.environ.items() if name not in SETTINGS} | given
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert ended.stdout.split() == [*(SETTINGS | given).values()], ended.stderr


def test_a_program_ends_without_a_last_collection() -> None:
    """It would visit every object of torch and transformers, which takes a second."""
    code = """import atexit, gc
atexit.register(lambda: print(gc.get_freeze_count() > 0))  # runs after those that are registered later
from lightseq.distributed.environment import set_up_process
set_up_process()"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "True\n"
