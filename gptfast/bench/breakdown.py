"""Where the time of a decode step goes: weights by kind of layer, attention, pointwise, sampling, host overhead.

A step is measured in three ways: as it is; with a clock around its kernels as they are, which leaves the time
between them; and, as one kernel may be several loops, built again with a kernel for every loop. What the three
do not agree on is a row of its own.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass, field

import torch

from gptfast.bench.kernels import ATTENTION, KernelTimer, TimedCall, list_products
from gptfast.bench.measurements import make_tokens
from gptfast.bench.phases import Clock
from gptfast.bench.results import Breakdown, StepPart
from gptfast.bench.roofline import count_kv_bytes
from gptfast.config import SamplingConfig
from gptfast.runner import Runner
from gptfast.sampling import sample

ROUNDS = 4
STEPS_PER_ROUND = 12
WARM_UP_STEPS = 4
STEPS_NEEDED = WARM_UP_STEPS + STEPS_PER_ROUND
"""Slots of the cache after the depth that are written."""
SAMPLING = "sampling"
HOST = "host overhead"
UNACCOUNTED = "unaccounted"


@dataclass
class StepTimes:
    """Seconds of all rounds: whole steps, their sampling, what passes outside kernels, and the kernels of each part."""

    whole: list[float] = field(default_factory=list)
    sampling: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


def measure_breakdown(runner: Runner, depth: int, sampling: SamplingConfig, clock: Clock) -> Breakdown:
    """Take decode steps apart that find about `depth` tokens in the cache; every figure is a median.

    The ways of measuring take turns, so that a drift of the machine is in all of them.
    """
    times = StepTimes()
    for _ in range(ROUNDS):
        time_whole_steps(runner, depth, sampling, clock, times)
        if has_host_of_its_own(runner):
            time_host(runner, depth, clock, times)
        time_parts(runner, depth, clock, times)
    return summarize_times(times, runner, depth)


def summarize_times(times: StepTimes, runner: Runner, depth: int) -> Breakdown:
    """The parts with the largest first, then sampling, host overhead and what remains of the whole step.

    Where the host's share could not be measured on its own it has no row, and is in what remains.
    """
    step_ms = 1e3 * statistics.median(times.whole)
    parts = [
        StepPart(name, 1e3 * statistics.median(seconds), count_part_bytes(runner, name, depth))
        for name, seconds in times.parts.items()
    ]
    parts.sort(key=lambda part: -part.ms)
    parts.append(StepPart(SAMPLING, 1e3 * statistics.median(times.sampling), 0))
    if times.host:
        parts.append(StepPart(HOST, 1e3 * statistics.median(times.host), 0))
    parts.append(StepPart(UNACCOUNTED, step_ms - sum(part.ms for part in parts), 0))
    return Breakdown(depth, step_ms, tuple(parts))


def time_whole_steps(runner: Runner, depth: int, sampling: SamplingConfig, clock: Clock, times: StepTimes) -> None:
    """Time steps with their choice of a token, and the choices alone."""
    tokens = make_tokens(runner)
    for number in range(STEPS_NEEDED):
        start = clock()
        logits = runner.decode(tokens, depth + number)
        middle = clock()
        position = torch.full((1,), depth + number + 1, device=runner.device)
        sample(logits, sampling, position).tolist()
        end = clock()
        if number >= WARM_UP_STEPS:
            times.whole.append(end - start)
            times.sampling.append(end - middle)


def has_host_of_its_own(runner: Runner) -> bool:
    """Whether looking at a step's kernels leaves the time between them as it was.

    Eagerly every operator would be slowed down on its way, and on CUDA kernels run in a graph.
    """
    return runner.is_compiled and runner.device.type == "cpu"


def time_host(runner: Runner, depth: int, clock: Clock, times: StepTimes) -> None:
    """Time what of a step passes outside its kernels."""
    for step_s, calls in time_kernels(runner, depth, clock):
        times.host.append(step_s - sum(call.seconds for call in calls))


def time_parts(runner: Runner, depth: int, clock: Clock, times: StepTimes) -> None:
    """Time the kernels of each part, by a step built so that every loop is a kernel."""
    with runner.separate_kernels():
        steps = time_kernels(runner, depth, clock)
    for _, calls in steps:
        seconds: dict[str, float] = defaultdict(float)
        for call in calls:
            seconds[call.part] += call.seconds
        for part, value in seconds.items():
            times.parts[part].append(value)


def time_kernels(runner: Runner, depth: int, clock: Clock) -> list[tuple[float, list[TimedCall]]]:
    """Seconds of each step, and its calls."""
    timer = KernelTimer(runner.model, is_compiled=runner.is_compiled)
    tokens = make_tokens(runner)
    steps = []
    with timer.active():
        for number in range(STEPS_NEEDED):
            start = clock()
            runner.decode(tokens, depth + number)
            steps.append((clock() - start, timer.take_calls()))
    return steps[WARM_UP_STEPS:]


def count_part_bytes(runner: Runner, part: str, depth: int) -> int:
    """Bytes of weights, or of keys and values, that the kernels of a part must read in a step."""
    if part == ATTENTION:
        return count_kv_bytes(runner, depth + WARM_UP_STEPS, STEPS_PER_ROUND)
    names = part.split(" + ")
    return sum(weight.nbytes for name, weight in list_products(runner.model) if name in names)
