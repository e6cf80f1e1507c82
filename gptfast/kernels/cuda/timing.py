"""Times of what a GPU is asked for, replayed as a CUDA graph; on a CPU, of the work itself, for tests."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable

import torch

from gptfast.graphs import Fetched, GraphBackend, Replay, get_cuda_graphs, note_moment

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
        start = note_moment(device)
        replay()
        seconds.append(note_moment(device).count_seconds_since(start))
    return statistics.median(seconds)


def measure_work(work: Callable[[], None], device: torch.device, repeats: int = REPEATS) -> float:
    """The median seconds of the work as a graph of its own."""
    return measure_seconds(open_graphs(device).record(work), device, repeats)


def free_memory(device: torch.device) -> None:
    """Give what nothing holds back to a GPU."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
