"""Which part of a benchmark's own wall-clock time went where."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

PHASES = ("import", "load", "compile", "probe", "warm_up", "prefill", "decode", "end_to_end", "breakdown")

Clock = Callable[[], float]
"""Seconds since some moment; on CUDA, seconds at which the GPU had done all it was given."""


class PhaseTimer:
    """Adds up the time spent in each of `PHASES`, from its own creation on."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._start = clock()
        self.seconds = dict.fromkeys(PHASES, 0.0)

    @contextlib.contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Count what runs within as that phase."""
        start = self._clock()
        yield
        self.seconds[phase] += self._clock() - start

    def get_wall_s(self) -> float:
        """Seconds since the timer was made."""
        return self._clock() - self._start
