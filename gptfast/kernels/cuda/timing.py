"""Times of what a GPU is asked for, replayed as a CUDA graph; on a CPU, of the work itself, for tests."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable

import torch

from gptfast.graphs import Fetched, GraphBackend, Replay, get_cuda_graphs

REPEATS = 7


class DirectRuns:
    """A `GraphBackend` that runs the work where a graph would be replayed."""

    def record(self, function: Callable[[], None]) -> Replay:
        """See `GraphBackend.record`."""
        function()
        return function

    def fetch(self, source: torch.Tensor) -> Fetched:
        """See `GraphBackend.fetch`."""
        copy = source.clone()
        return copy.tolist


def open_graphs(device: torch.device) -> GraphBackend:
    """CUDA graphs on CUDA."""
    return get_cuda_graphs(device) if device.type == "cuda" else DirectRuns()


def measure_seconds(replay: Replay, device: torch.device, repeats: int = REPEATS) -> float:
    """The median of so many replays, each timed on the device, after one that is not counted."""
    replay()
    seconds: list[float] = []
    for _ in range(repeats):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            replay()
            end.record()
            end.synchronize()
            seconds.append(start.elapsed_time(end) / 1e3)
        else:
            before = time.perf_counter()
            replay()
            seconds.append(time.perf_counter() - before)
    return statistics.median(seconds)


def measure_work(work: Callable[[], None], device: torch.device, repeats: int = REPEATS) -> float:
    """The median seconds of the work as a graph of its own."""
    return measure_seconds(open_graphs(device).record(work), device, repeats)


def free_memory(device: torch.device) -> None:
    """Give what nothing holds back to a GPU."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
