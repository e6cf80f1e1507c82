"""The GPU that a section runs on, and its clock."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def find_device() -> torch.device:
    """The GPU that a section runs on."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    return torch.device("cuda", torch.cuda.current_device())


def get_clock(device: torch.device) -> Callable[[], float]:
    """Seconds at which the device had done all it was given."""

    def clock() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    return clock
