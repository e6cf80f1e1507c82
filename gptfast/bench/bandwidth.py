"""The ceiling: how fast this machine reads memory, measured in the same run as what is held against it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gptfast.bench.phases import Clock
from gptfast.bench.results import Bandwidth
from gptfast.bench.statistics import Spread, summarize_runs
from gptfast.memory import get_available_memory

PROBE_BYTES = {"cpu": 512 * 2**20, "cuda": 4 * 2**30}
"""Many times a last-level cache, so that little is left there of a read when its turn comes again."""
READS_PER_PASS = {"cpu": 8, "cuda": 1}
"""On a CPU a read takes about as long as a decode step, so that the medians of both stand the same disturbances."""
PASSES = 24
LARGEST_SHARE_OF_FREE_MEMORY = 0.5


@dataclass(frozen=True)
class Probe:
    """One probe: GB/s over its reads, and the size of the buffer that they went through."""

    gb_per_s: Spread
    buffer_bytes: int


@torch.no_grad()
def probe_bandwidth(device: torch.device, clock: Clock) -> Probe:
    """Go through a buffer of float32 again and again with the threads that torch uses now, summing it up.

    The sum is torch's own and needs no compiling. The first pass, which brings the buffer's pages in, is not counted.
    """
    buffer = torch.ones(choose_probe_bytes(device) // 4, device=device)
    rates = []
    for _ in range(1 + PASSES):
        for part in buffer.chunk(READS_PER_PASS[device.type]):
            start = clock()
            part.sum()
            rates.append(part.nbytes / (clock() - start) / 1e9)
    return Probe(summarize_runs(rates[READS_PER_PASS[device.type] :]), buffer.nbytes)


def choose_probe_bytes(device: torch.device) -> int:
    """The usual size, or less where a model has left little memory."""
    free = get_available_memory(device)
    wanted = PROBE_BYTES[device.type]
    return wanted if free is None else min(wanted, int(free * LARGEST_SHARE_OF_FREE_MEMORY))


def compare_probes(before: Probe, after: Probe) -> Bandwidth:
    """The ceiling of two probes, and how far they are apart."""
    low, high = sorted((before.gb_per_s.median, after.gb_per_s.median))
    return Bandwidth(
        probe_bytes=before.buffer_bytes,
        before_gb_per_s=before.gb_per_s,
        after_gb_per_s=after.gb_per_s,
        ceiling_gb_per_s=high,
        drift=1 - low / high,
    )
