"""From what was measured to what is reported: quantiles, rates, the floor and the share of it, notes."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gptfast.bench.bandwidth import Probe, compare_probes
from gptfast.bench.environment import Environment, describe_environment
from gptfast.bench.measurements import DecodeRuns, PrefillRuns
from gptfast.bench.phases import PhaseTimer
from gptfast.bench.results import (
    Bandwidth,
    BenchmarkResult,
    Breakdown,
    DecodeResult,
    Execution,
    Memory,
    ModelFacts,
    Phases,
    PrefillResult,
    Settings,
)
from gptfast.bench.roofline import compute_floor_ms, count_kv_bytes
from gptfast.bench.statistics import summarize_latencies, summarize_runs
from gptfast.checkpoint.random import RandomCheckpoint
from gptfast.compilation import has_recorded_cuda_graphs
from gptfast.inspection import count_parameters
from gptfast.memory import get_peak_memory, get_peak_resident_memory, get_resident_memory
from gptfast.runner import Runner
from gptfast.session import Session

LARGEST_DRIFT = 0.15
LARGEST_OTHER_LOAD = 0.05
SMALLEST_CACHED_SHARE = 0.02


@dataclass(frozen=True)
class Measurements:
    """All that was measured, as it came; `recompiles` and `other_load` are those of the runs."""

    before: Probe
    after: Probe
    prefill: Sequence[PrefillRuns]
    decode: Sequence[DecodeRuns]
    breakdown: Breakdown | None
    memory: Memory
    recompiles: int
    other_load: float | None


def summarize(session: Session, settings: Settings, measurements: Measurements, phases: PhaseTimer) -> BenchmarkResult:
    """Reduce the measurements of a session to its result, which also ends the benchmark's wall-clock time."""
    bandwidth = compare_probes(measurements.before, measurements.after)
    model = describe_model(session)
    decode = tuple(
        summarize_decode(
            runs,
            session,
            weight_bytes=model.weight_bytes_per_token,
            ceiling_gb_per_s=bandwidth.ceiling_gb_per_s,
        )
        for runs in measurements.decode
    )
    environment = describe_environment(session.runner.device, torch.get_num_threads())
    execution = describe_execution(session, measurements)
    return BenchmarkResult(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        environment=environment,
        model=model,
        settings=settings,
        execution=execution,
        bandwidth=bandwidth,
        prefill=tuple(summarize_prefill(runs) for runs in measurements.prefill),
        decode=decode,
        breakdown=measurements.breakdown,
        memory=measurements.memory,
        notes=write_notes(session, environment, execution, bandwidth, decode),
        phases=summarize_phases(phases),
    )


def summarize_prefill(runs: PrefillRuns) -> PrefillResult:
    """Rates and times of one prompt length."""
    length = len(runs.prompt)
    return PrefillResult(
        prompt_tokens=length,
        tokens_per_s=summarize_runs([length / seconds for seconds in runs.steps_s]),
        ttft_s=summarize_runs(runs.ttft_s),
    )


def summarize_decode(runs: DecodeRuns, session: Session, *, weight_bytes: int, ceiling_gb_per_s: float) -> DecodeResult:
    """Rates and times of one depth, held against the ceiling."""
    rows = session.runner.batch_size
    kv_bytes = count_kv_bytes(session.runner, runs.depth, runs.new_tokens)
    bytes_per_step = weight_bytes + kv_bytes
    step_ms = summarize_latencies(list(itertools.chain(*runs.steps_s)))
    floor_ms = compute_floor_ms(bytes_per_step, ceiling_gb_per_s)
    return DecodeResult(
        depth=runs.depth,
        tokens_per_s=summarize_runs([rows * len(steps) / sum(steps) for steps in runs.steps_s]),
        step=step_ms,
        end_to_end_tokens_per_s=summarize_runs([rows * len(tokens) / sum(tokens) for tokens in runs.tokens_s]),
        token=summarize_latencies(list(itertools.chain(*runs.tokens_s))),
        kv_bytes_per_step=kv_bytes,
        bytes_per_step=bytes_per_step,
        floor_ms=floor_ms,
        gb_per_s=bytes_per_step / step_ms.p50_ms / 1e6,
        share=floor_ms / step_ms.p50_ms,
    )


def summarize_phases(phases: PhaseTimer) -> Phases:
    """Every phase, and what remains of the time since the timer began."""
    wall_s = phases.get_wall_s()
    seconds = {f"{name}_s": value for name, value in phases.seconds.items()}
    return Phases(**seconds, other_s=wall_s - sum(seconds.values()), wall_s=wall_s)


def describe_model(session: Session) -> ModelFacts:
    """What was measured."""
    return ModelFacts(
        name=session.checkpoint.path.absolute().name,
        random_weights=isinstance(session.checkpoint, RandomCheckpoint),
        parameters=count_parameters(session.checkpoint.config).total,
        dtype=session.dtype,
        weights=session.weights,
        activations=session.activations,
        kv_dtype=session.kv_dtype,
        weight_bytes_per_token=session.weight_bytes_per_token,
        kv_bytes_per_token=session.runner.kv_bytes_per_token,
    )


def describe_execution(session: Session, measurements: Measurements) -> Execution:
    """How the steps were executed."""
    runner = session.runner
    return Execution(
        compiled=runner.is_compiled,
        compile_kind=runner.compile_kind,
        kernels=session.kernels,
        step=session.step,
        cuda_graphs=has_replayed_graphs(runner),
        recompiles=measurements.recompiles,
        other_load=measurements.other_load,
    )


def has_replayed_graphs(runner: Runner) -> bool:
    """Whether steps were really replayed as CUDA graphs, ours or torch's."""
    return runner.replayed_steps > 0 or (runner.uses_graph_trees and has_recorded_cuda_graphs())


def describe_memory(device: torch.device) -> Memory:
    """What is held now, and was at most."""
    return Memory(
        resident_bytes=get_resident_memory(),
        peak_resident_bytes=get_peak_resident_memory(),
        device_peak_bytes=get_peak_memory(device) if device.type == "cuda" else None,
    )


def write_notes(
    session: Session,
    environment: Environment,
    execution: Execution,
    bandwidth: Bandwidth,
    decode: Sequence[DecodeResult],
) -> tuple[str, ...]:
    """What a reader of the figures must know about this run."""
    runner = session.runner
    notes = []
    if execution.other_load is not None and execution.other_load > LARGEST_OTHER_LOAD:
        notes.append(
            f"other processes, or the host, used {execution.other_load:.0%} of the processors during the runs, which "
            "can slow a step down many times: repeat this on a quiet machine"
        )
    if bandwidth.drift > LARGEST_DRIFT:
        notes.append(
            f"the read bandwidth drifted by {bandwidth.drift:.0%} between the probes, so the machine did not stay the "
            "same: the shares are of the higher one, and other runs may differ by more than the spreads"
        )
    cache_bytes = environment.last_level_cache_bytes or 0
    cached = cache_bytes / min(result.bytes_per_step for result in decode)
    if cached > SMALLEST_CACHED_SHARE:
        notes.append(
            f"up to {min(cached, 1):.0%} of a step's bytes fit into the last-level cache of {cache_bytes / 2**20:.0f} "
            "MiB and need not come from memory, so a share can pass 100 %"
        )
    if execution.recompiles:
        notes.append(f"{execution.recompiles} compilations happened during the runs, which spoils the figures")
    if runner.compiling_was_asked and not runner.is_compiled:
        notes.append("this machine could not compile, so the steps ran eagerly")
    if runner.device.type == "cuda" and not execution.cuda_graphs:
        notes.append("no CUDA graphs were replayed, so every kernel was launched by the host")
    if session.tokenizer is None:
        notes.append("random weights have no tokenizer, so there is no detokenization in the end-to-end figures")
    return tuple(notes)
