"""Repeated measurements as quantiles, never as a mean: one slow run on a busy machine would move a mean for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Spread:
    """A figure over whole runs, in the unit that its owner names: the middle, and what 80 % of the runs lie between."""

    runs: int
    median: float
    p10: float
    p90: float


@dataclass(frozen=True)
class Latency:
    """Times of single tokens or steps in milliseconds, those of all runs pooled."""

    count: int
    p50_ms: float
    p90_ms: float
    p99_ms: float


def summarize_runs(values: Sequence[float]) -> Spread:
    """The quantiles of one figure per run; between two runs they are interpolated."""
    p10, median, p90 = np.quantile(values, (0.1, 0.5, 0.9)).tolist()
    return Spread(len(values), median, p10, p90)


def summarize_latencies(seconds: Sequence[float]) -> Latency:
    """The quantiles of single times, which are given in seconds."""
    p50, p90, p99 = (1e3 * np.quantile(seconds, (0.5, 0.9, 0.99))).tolist()
    return Latency(len(seconds), p50, p90, p99)
