"""Random states of a process, as plain numbers that a file can hold."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch


def file_of(rank: int) -> str:
    return f"random-{rank}.json"


def capture(device: torch.device) -> dict[str, Any]:
    """Returns the random states of Python, numpy and torch, on the CPU and the device. Does not wait for the device."""
    version, words, gauss = random.getstate()
    kind, keys, place, has_gauss, cached = np.random.get_state()
    assert kind == "MT19937", kind
    on_device = torch.cuda.get_rng_state(device).tolist() if device.type == "cuda" else None
    return {
        "python": [version, list(words), gauss],
        "numpy": [np.asarray(keys).tolist(), int(place), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "device": on_device,
    }


def restore(path: Path, device: torch.device) -> None:
    """Restores random states from a file; without the file, nothing changes."""
    if not path.is_file():
        return
    try:
        state = json.loads(path.read_text())
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        np.random.set_state(("MT19937", *state["numpy"]))
        torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["torch"]), dtype=torch.uint8))
        if device.type == "cuda" and state["device"] is not None:
            torch.cuda.set_rng_state(torch.tensor(state["device"], dtype=torch.uint8), device)
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{path} holds no random states; name another checkpoint") from error
