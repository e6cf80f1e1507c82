"""Which kernels a decode step consists of, and how much of its time each takes, by torch's profiler."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from acceptance.findings import Findings
from gptfast.config import SamplingConfig
from gptfast.runner import Runner
from gptfast.sampling import Sampler

STEPS = 16
"""That are profiled at once."""
MOST_ROWS = 12
"""Kernels with a row of their own, the longest first."""
LONGEST_NAME = 60
COPIES = "Memcpy"
"""How the profiler calls those to the host, which run beside the steps."""


@dataclass(frozen=True)
class Kernel:
    """What a kernel takes of one step.

    Attributes:
        name: as the profiler has it.
        count: launches, of a step on average.
        us: microseconds of all of them.
    """

    name: str
    count: float
    us: float


def break_down_step(findings: Findings, runner: Runner, depth: int, step_us: float, title: str) -> None:
    """Add a table of the kernels of a step at that depth; a fact instead where the profiler sees none.

    `step_us` is the step's time without the profiler, which slows it down.
    """
    kernels = profile_steps(runner, depth)
    if not kernels:
        findings.note(**{f"not broken down, {title}": "the profiler saw no kernel"})
        return
    for row in describe_kernels(kernels, step_us):
        findings.add_row(title, row)


def profile_steps(runner: Runner, depth: int, steps: int = STEPS) -> list[Kernel]:
    """The kernels of steps from that depth on, which were run before; on a CPU, torch's operators."""
    is_cuda = runner.device.type == "cuda"
    activity = torch.profiler.ProfilerActivity
    sampler = Sampler(SamplingConfig(), [0], runner.vocab_size, device=runner.device)
    token = torch.zeros(1, dtype=torch.int64, device=runner.device)
    with torch.profiler.profile(activities=[activity.CUDA if is_cuda else activity.CPU]) as profile:
        for _ in runner.extend(sampler, token, depth, steps):
            pass
        if is_cuda:
            torch.cuda.synchronize(runner.device)
    return list_kernels(profile.key_averages(), "CUDA" if is_cuda else "CPU", steps)


def list_kernels(averages: Iterable[Any], device: str, steps: int) -> list[Kernel]:
    """Those that ran on the `CUDA` or `CPU`, the longest first, without copies and without what only spans others."""
    kernels = []
    for each in averages:
        spans = getattr(each, "is_user_annotation", False)
        if each.device_type.name != device or spans or each.key.startswith(COPIES):
            continue
        us = each.self_cpu_time_total if device == "CPU" else each.self_device_time_total
        kernels.append(Kernel(each.key, each.count / steps, us / steps))
    return sorted(kernels, key=lambda kernel: -kernel.us)


def describe_kernels(kernels: Sequence[Kernel], step_us: float) -> list[dict[str, str]]:
    """A row for each of the longest, one for all others, one for what no kernel takes, and one for the step.

    Kernels that overlap, as dependent launches do, may add up to more than the step; the rest is then negative.
    """
    first, others = kernels[:MOST_ROWS], kernels[MOST_ROWS:]
    count, us = sum(kernel.count for kernel in kernels), sum(kernel.us for kernel in kernels)
    lines = [*first]
    if others:
        lines.append(
            Kernel(f"{len(others)} others", sum(each.count for each in others), sum(each.us for each in others))
        )
    lines += [Kernel("between kernels", 0, step_us - us), Kernel("whole step", count, step_us)]
    return [
        {
            "kernel": line.name if len(line.name) <= LONGEST_NAME else f"{line.name[: LONGEST_NAME - 3]}...",
            "launches": f"{line.count:g}",
            "us": f"{line.us:.1f}",
            "us each": f"{line.us / line.count:.2f}" if line.count else "",
            "share": f"{line.us / step_us:.1%}",
        }
        for line in lines
    ]
