"""Record what a device is asked for, once, and ask for it again in one call: CUDA graphs, and what they must offer."""

from __future__ import annotations

import functools
import gc
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

WARM_UPS = 3
"""Runs before a recording: in the first, kernels are compiled, tuned and loaded, which cannot be recorded."""

Replay = Callable[[], None]
Fetched = Callable[[], list[Any]]


class GraphBackend(Protocol):
    """Where steps are recorded and replayed. What a step reads and writes beyond its own stays at one address."""

    def record(self, function: Callable[[], None]) -> Replay:
        """Run the function a few times, record it, and return what replays it, in order with other work."""

    def fetch(self, source: Tensor) -> Fetched:
        """Begin to copy a tensor to the host; what is returned waits for that, and for no later work."""


class CudaGraphs:
    """The graphs of a GPU: one stream to record on and one pool for what steps allocate.

    Steps share the pool, so what one of them leaves for another, or for the host, lies outside it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._recording: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copying: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        # The pool lives as long as a graph in it, so that this one keeps it for those to come.
        self._empty = torch.cuda.CUDAGraph()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it has no kernels
            with torch.cuda.graph(
                self._empty, pool=self._pool, stream=self._recording, capture_error_mode="thread_local"
            ):
                pass

    def record(self, function: Callable[[], None]) -> Replay:
        """See `GraphBackend.record`."""
        self._recording.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._recording):
            for _ in range(WARM_UPS):
                function()
        torch.cuda.current_stream(self._device).wait_stream(self._recording)
        graph = torch.cuda.CUDAGraph()
        # A tensor or kernel that is freed while recording would end the recording.
        gc.collect()
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._recording, capture_error_mode="thread_local"):
                function()
        finally:
            if was_enabled:
                gc.enable()
        return graph.replay

    def fetch(self, source: Tensor) -> Fetched:
        """See `GraphBackend.fetch`."""
        destination = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        # A stream of its own, so that the copy does not stand between two steps.
        self._copying.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._copying):
            destination.copy_(source, non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._copying)
        # Its memory is not handed out again before it was copied.
        source.record_stream(self._copying)

        def wait() -> list[Any]:
            done.synchronize()
            values: list[Any] = destination.tolist()
            return values

        return wait


class Moment(Protocol):
    """When all work that was asked for before is done, by the clock of who does it."""

    def count_seconds_since(self, earlier: Any) -> float:
        """From an `earlier` moment of the same device; waits for this one."""


@dataclass(frozen=True)
class HostMoment:
    """A `Moment` of a device that works while the host waits; `seconds` by the host's clock."""

    seconds: float

    def count_seconds_since(self, earlier: HostMoment) -> float:
        """See `Moment.count_seconds_since`."""
        return self.seconds - earlier.seconds


@dataclass(frozen=True)
class CudaMoment:
    """A `Moment` of a GPU, which the host runs ahead of: an event in its stream."""

    event: Any

    def count_seconds_since(self, earlier: CudaMoment) -> float:
        """See `Moment.count_seconds_since`."""
        self.event.synchronize()
        milliseconds: float = earlier.event.elapsed_time(self.event)
        return milliseconds / 1000


def note_moment(device: torch.device) -> Moment:
    """The moment that is now for who asks the device for work."""
    if device.type != "cuda":
        return HostMoment(time.perf_counter())
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return CudaMoment(event)


def send_ids(ids: Sequence[int], device: torch.device) -> Tensor:
    """Token ids as (n,) int64 on the device; the host does not wait for them to arrive."""
    return torch.tensor(ids, dtype=torch.int64, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def get_cuda_graphs(device: torch.device) -> CudaGraphs:
    """Those of the whole process: memory is kept by stream and pool, so more of them would only cost memory."""
    return _open_cuda_graphs(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _open_cuda_graphs(index: int) -> CudaGraphs:
    return CudaGraphs(torch.device("cuda", index))
