from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest
import torch

from gptfast.bench import bandwidth
from gptfast.bench.bandwidth import PASSES, PROBE_BYTES, READS_PER_PASS, Probe, compare_probes, probe_bandwidth
from gptfast.bench.roofline import compute_floor_ms, count_kv_bytes
from gptfast.bench.statistics import Spread
from gptfast.session import Session
from tests.reference.clock import FakeClock
from tests.reference.sessions import load_tiny, tiny_config

CPU = torch.device("cpu")


def make_probe(median: float) -> Probe:
    return Probe(Spread(10, median, median - 1, median + 1), 1000)


@pytest.fixture
def small_probe(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(bandwidth, "get_available_memory", lambda _: 64_000)
    return 32_000


def test_a_probe_tells_bytes_read_over_time(small_probe: int) -> None:
    probe = probe_bandwidth(CPU, FakeClock(tick=1e-6))
    reads = READS_PER_PASS["cpu"]
    assert probe.buffer_bytes == small_probe
    assert probe.gb_per_s.runs == reads * PASSES
    assert probe.gb_per_s.median == pytest.approx(small_probe / reads / 1e-6 / 1e9)


def test_every_read_touches_another_part_and_a_pass_all_of_the_buffer(
    small_probe: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[tuple[int, int]] = []
    original = torch.Tensor.sum

    def note(part: torch.Tensor) -> torch.Tensor:
        read.append((part.data_ptr(), part.nbytes))
        return original(part)

    monkeypatch.setattr(torch.Tensor, "sum", note)
    probe_bandwidth(CPU, FakeClock(tick=1.0))
    one_pass = read[: READS_PER_PASS["cpu"]]
    assert sum(size for _, size in one_pass) == small_probe
    assert len({address for address, _ in one_pass}) == len(one_pass)
    assert read == one_pass * (1 + PASSES)


@pytest.mark.parametrize(("free", "expected"), [(None, 512 * 2**20), (10**12, 512 * 2**20), (10**8, 5 * 10**7)])
def test_a_probe_leaves_half_of_the_free_memory(
    free: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bandwidth, "get_available_memory", lambda _: free)
    assert bandwidth.choose_probe_bytes(CPU) == expected


def test_a_real_probe_measures_something() -> None:
    probe = probe_bandwidth(CPU, time.perf_counter)
    assert probe.buffer_bytes <= PROBE_BYTES["cpu"]
    assert 0 < probe.gb_per_s.p10 <= probe.gb_per_s.median <= probe.gb_per_s.p90 < 10_000


@pytest.mark.parametrize(("before", "after"), [(40.0, 30.0), (30.0, 40.0)])
def test_the_ceiling_is_the_higher_probe_and_drift_tells_the_lower(before: float, after: float) -> None:
    compared = compare_probes(make_probe(before), make_probe(after))
    assert compared.ceiling_gb_per_s == 40.0
    assert compared.drift == pytest.approx(0.25)
    assert (compared.before_gb_per_s.median, compared.after_gb_per_s.median) == (before, after)


def test_the_floor_is_bytes_over_bandwidth() -> None:
    assert compute_floor_ms(30_000_000, 30.0) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("depth", "steps", "attended"),
    [(0, 1, 1), (0, 3, 2), (512, 1, 513), (2048, 64, 2080)],
)
def test_kv_bytes_are_those_of_the_middle_step(depth: int, steps: int, attended: int, directory: Path) -> None:
    """Step i of a run attends to `depth` + i + 1 tokens, its own included; the middle one to as many as the mean."""
    config = tiny_config()
    mean = sum(depth + i + 1 for i in range(steps)) / steps
    assert attended in (int(mean), round(mean))
    for dtype, element_bytes in (("float32", 4), ("bfloat16", 2)):
        per_token = 2 * config.n_layers * config.n_kv_heads * config.head_dim * element_bytes
        for rows in (1, 3):
            runner = load_tiny(directory, dtype=dtype, batch_size=rows).runner
            assert count_kv_bytes(runner, depth, steps) == rows * attended * per_token


def test_a_sliding_window_bounds_what_is_read(eager: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    one_token = count_kv_bytes(eager.runner, 0, 1)
    monkeypatch.setattr(eager.runner.model, "config", dataclasses.replace(tiny_config(), sliding_window=100))
    assert count_kv_bytes(eager.runner, 5000, 64) == 100 * one_token
