"""`run_benchmark`: every phase on its own, the runs in turn, the ceiling before and after."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from gptfast.bench.bandwidth import Probe, probe_bandwidth
from gptfast.bench.breakdown import STEPS_NEEDED, measure_breakdown
from gptfast.bench.load import OtherLoad
from gptfast.bench.measurements import DecodeRuns, PrefillRuns, fill_caches
from gptfast.bench.phases import Clock, PhaseTimer
from gptfast.bench.results import BenchmarkResult, Breakdown, Settings
from gptfast.bench.summary import Measurements, describe_memory, has_replayed_graphs, summarize
from gptfast.compilation import count_traced_graphs
from gptfast.config import SamplingConfig
from gptfast.errors import PromptError, UserError
from gptfast.generation import make_synthetic_prompt
from gptfast.memory import reset_peak_memory
from gptfast.runner import Runner
from gptfast.session import Session

FEWEST_REPEATS = 3

Say = Callable[[str], None]
"""Is told what is measured next, in a line."""


def run_benchmark(
    session: Session, settings: Settings, phases: PhaseTimer, *, breaks_down: bool, say: Say
) -> BenchmarkResult:
    """Measure a session that was just loaded, and leave its cache without any text.

    Args:
        session: compiled or eager, of the batch size in `settings`.
        settings: what to measure; see `check_settings`.
        phases: begun by the caller, who counted importing and loading.
        breaks_down: whether to take a step at the first depth apart, too.
        say: is told of the progress.

    Raises:
        PromptError: a prompt or a depth does not fit the context, or the memory.
    """
    runner, clock = session.runner, make_clock(session.runner.device)
    if breaks_down and runner.fused is not None:
        raise UserError(
            "a fused step has no parts that could be timed one by one; use --step compiled to take one apart"
        )
    sampling = settings.sampling
    longest = count_slots(settings, runner.context, breaks_down)
    runner.reserve(longest)
    say("compiling the steps, or loading them")
    with phases.measure("compile"):
        runner.warm_up()
    with phases.measure("warm_up"):
        fill_caches(session, longest)
    early = describe_memory(runner.device)
    before = measure_ceiling(runner, clock, phases, say)

    text = make_synthetic_prompt(session, longest)
    prefill = [PrefillRuns(text[:length]) for length in settings.prompt_lengths]
    decode = [DecodeRuns(depth, settings.new_tokens, text) for depth in settings.depths]
    all_runs: list[PrefillRuns | DecodeRuns] = [*prefill, *decode]
    say("warming up")
    with phases.measure("warm_up"):
        for runs in all_runs:
            runs.warm_up(session, sampling, clock)
    compilations, load = count_compilations(runner), OtherLoad()
    for number in range(settings.repeats):
        say(f"run {number + 1} of {settings.repeats}")
        # In turn, so that a machine whose speed drifts slows all of them down alike.
        for runs in all_runs:
            runs.run(session, sampling, clock, phases)
    check_graphs(runner)
    recompiles, other_load = count_compilations(runner) - compilations, load.get_share()
    memory = describe_memory(runner.device).cover(early)
    after = measure_ceiling(runner, clock, phases, say)

    breakdown = take_step_apart(runner, settings.depths[0], sampling, clock, phases, say) if breaks_down else None
    session.cached_ids = []
    measurements = Measurements(before, after, prefill, decode, breakdown, memory, recompiles, other_load)
    return summarize(session, settings, measurements, phases)


def check_graphs(runner: Runner) -> None:
    """Raise UserError if steps were to be replayed as CUDA graphs and were not: figures would be of something else."""
    is_asked = runner.graphs is not None or (runner.uses_graph_trees and runner.device.type == "cuda")
    if is_asked and not has_replayed_graphs(runner):
        raise UserError(
            "the steps were to be replayed as CUDA graphs and were launched by the host instead; "
            "use --cuda-graphs off to measure that, or see with TORCH_LOGS=cudagraphs why they were skipped"
        )


def measure_ceiling(runner: Runner, clock: Clock, phases: PhaseTimer, say: Say) -> Probe:
    """Probe the memory of the runner's device; the probe's own buffer does not stay in the peaks."""
    say("measuring the read bandwidth")
    with phases.measure("probe"):
        probe = probe_bandwidth(runner.device, clock)
    reset_peak_memory(runner.device)
    return probe


def take_step_apart(
    runner: Runner, depth: int, sampling: SamplingConfig, clock: Clock, phases: PhaseTimer, say: Say
) -> Breakdown:
    """Measure where the time of a step goes."""
    say("taking a step apart")
    with phases.measure("breakdown"):
        return measure_breakdown(runner, depth, sampling, clock)


def check_settings(settings: Settings) -> None:
    """Raise UserError for what no model could be measured with."""
    _ = settings.sampling
    if settings.repeats < FEWEST_REPEATS:
        raise UserError(
            f"repeats is {settings.repeats}; at least {FEWEST_REPEATS} are needed to tell the spread of a figure"
        )
    if settings.new_tokens < 1:
        raise UserError(f"new-tokens is {settings.new_tokens}; it must be at least 1")
    if any(length < 1 for length in settings.prompt_lengths):
        raise UserError(f"a prompt of {min(settings.prompt_lengths)} tokens cannot be read; give lengths from 1 on")
    if any(depth < 0 for depth in settings.depths):
        raise UserError(f"depth {min(settings.depths)} is not possible; give the number of tokens in the cache")


def count_slots(settings: Settings, context: int, breaks_down: bool) -> int:
    """How many tokens the cache must hold; raises PromptError if that is more than the context."""
    # A text has at least one token, and one more than those that are timed.
    needed = {depth: max(depth, 1) + settings.new_tokens + 1 for depth in settings.depths}
    if breaks_down:
        needed[settings.depths[0]] = max(needed[settings.depths[0]], settings.depths[0] + STEPS_NEEDED)
    depth, slots = max(needed.items(), key=lambda item: item[1])
    if slots > context:
        raise PromptError(
            f"{slots - depth} tokens after a depth of {depth} do not fit the model's context of {context}; "
            "use smaller --depths or fewer --new-tokens"
        )
    if max(settings.prompt_lengths) >= context:
        raise PromptError(
            f"a prompt of {max(settings.prompt_lengths)} tokens and one more do not fit the model's context of "
            f"{context}; use shorter --prompt-lengths"
        )
    return max(slots, max(settings.prompt_lengths) + 1)


def make_clock(device: torch.device) -> Clock:
    """A clock that tells when the work given to the device so far is done."""
    if device.type == "cpu":
        return time.perf_counter

    def read_clock() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return read_clock


def count_compilations(runner: Runner) -> int:
    """How many steps were compiled or loaded and graphs traced so far; it must not grow while measuring."""
    statistics = runner.compile_statistics
    steps = statistics.compiled + statistics.loaded
    return steps + count_traced_graphs() if runner.is_compiled else steps
