"""Quantiles of times that are known beforehand, as a fake clock tells them."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptfast.bench.statistics import Latency, Spread, summarize_latencies, summarize_runs
from tests.reference.clock import FakeClock

times = st.lists(st.floats(min_value=1e-6, max_value=1e6), min_size=1, max_size=50)


def time_steps(durations: Iterable[float]) -> list[float]:
    """What a clock that is read before and after steps of these durations says about them."""
    clock, seconds = FakeClock(), []
    for duration in durations:
        start = clock()
        clock.pass_by(duration)
        seconds.append(clock() - start)
        clock.pass_by(1.0)
    return seconds


def compute_quantile(values: Iterable[float], share: float) -> float:
    """Definition 7 of Hyndman and Fan (1996): linear between the order statistics around (n - 1) * share."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * share
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def test_single_times_are_quantiles_in_milliseconds() -> None:
    durations = [number / 1024 for number in range(101)]
    seconds = time_steps(durations)
    expected = [pytest.approx(1e3 * number / 1024, abs=1e-9) for number in (50, 90, 99)]
    assert summarize_latencies(seconds) == Latency(101, *expected)


def test_one_slow_step_moves_the_tail_alone() -> None:
    usual = summarize_latencies(time_steps([0.25] * 200))
    disturbed = summarize_latencies(time_steps([0.25] * 199 + [64.0]))
    assert disturbed == usual == Latency(200, 250.0, 250.0, 250.0)
    assert summarize_latencies(time_steps([0.25] * 196 + [64.0] * 4)).p99_ms == 64_000


def test_one_slow_run_does_not_move_the_median() -> None:
    assert summarize_runs([10.0, 11.0, 12.0, 13.0, 14.0]).median == 12.0
    assert summarize_runs([10.0, 11.0, 12.0, 13.0, 900.0]).median == 12.0


def test_between_two_runs_the_figures_are_interpolated() -> None:
    assert summarize_runs([1.0, 3.0]) == Spread(2, 2.0, pytest.approx(1.2), pytest.approx(2.8))
    assert summarize_runs([5.0, 1.0, 4.0, 2.0, 3.0]) == Spread(5, 3.0, pytest.approx(1.4), pytest.approx(4.6))


def test_a_single_run_is_all_of_its_spread() -> None:
    assert summarize_runs([7.5]) == Spread(1, 7.5, 7.5, 7.5)
    assert summarize_latencies([0.5]) == Latency(1, 500.0, 500.0, 500.0)


@given(times)
def test_every_quantile_follows_its_definition(values: list[float]) -> None:
    spread, latency = summarize_runs(values), summarize_latencies(values)
    assert (spread.runs, latency.count) == (len(values), len(values))
    for share, found in ((0.1, spread.p10), (0.5, spread.median), (0.9, spread.p90)):
        assert found == pytest.approx(compute_quantile(values, share), rel=1e-9)
    for share, found in ((0.5, latency.p50_ms), (0.9, latency.p90_ms), (0.99, latency.p99_ms)):
        assert found == pytest.approx(1e3 * compute_quantile(values, share), rel=1e-9)


@given(times, st.integers(0, 1000))
def test_the_order_of_the_runs_does_not_matter(values: list[float], seed: int) -> None:
    shuffled = random.Random(seed).sample(values, len(values))
    assert summarize_runs(shuffled) == summarize_runs(values)
    assert summarize_latencies(shuffled) == summarize_latencies(values)


def test_the_figures_are_plain_numbers_that_json_knows() -> None:
    spread, latency = summarize_runs([1.0, 2.0]), summarize_latencies([1.0, 2.0])
    assert {type(value) for value in (spread.median, spread.p10, spread.p90)} == {float}
    assert {type(value) for value in (latency.p50_ms, latency.p90_ms, latency.p99_ms)} == {float}
