"""A benchmark's result as tables for people."""

from __future__ import annotations

import dataclasses

from gptfast.bench.environment import Environment
from gptfast.bench.results import BenchmarkResult, Breakdown, DecodeResult, ModelFacts, Phases
from gptfast.bench.statistics import Spread
from gptfast.cli.tables import format_table


def format_benchmark(result: BenchmarkResult) -> str:
    """What was measured on what, prefill, decode against the floor, the step's parts, and all that qualifies it."""
    sections = [
        format_head(result),
        format_prefill(result),
        format_decode(result),
        *([format_breakdown(result.breakdown)] if result.breakdown is not None else []),
        format_foot(result),
    ]
    return "\n\n".join(sections)


def format_head(result: BenchmarkResult) -> str:
    """Model, machine and method."""
    settings = result.settings
    how = "eager"
    if result.execution.compiled:
        how = f"compiled ({result.execution.compile_kind})"
        how += ", CUDA graphs" if result.execution.cuda_graphs else ""
    if result.environment.device == "cuda":
        how += ", fused steps" if result.execution.step == "fused" else ""
        how += f", {result.execution.kernels} kernels"
    return "\n".join(
        [
            f"{format_model(result.model)}, {how}",
            format_environment(result.environment),
            f"{result.date}, {settings.repeats} runs in turn after a warm-up, batch size {settings.batch_size}; "
            "medians (10 % to 90 % of the runs)",
        ]
    )


def format_model(model: ModelFacts) -> str:
    """Name, size and precision in a line."""
    drawn = ", random weights" if model.random_weights else ""
    return f"{model.name}{drawn}, {model.parameters / 1e6:,.1f} M parameters, {model.precision}"


def format_environment(environment: Environment) -> str:
    """Machine and software in a line."""
    threads = f"{environment.threads} threads, " if environment.device == "cpu" else ""
    commit = ""
    if environment.commit is not None:
        commit = f" ({environment.commit}{'' if environment.commit_is_clean else ', changed'})"
    return f"{environment.device_name}, {threads}torch {environment.torch}, gptfast {environment.gptfast}{commit}"


def format_prefill(result: BenchmarkResult) -> str:
    """A row per prompt length."""
    rows: list[tuple[str, ...]] = [("prefill", "tokens/s, steps alone", "s to the first token, end to end")]
    for entry in result.prefill:
        rows.append(
            (f"{entry.prompt_tokens:,} tokens", format_spread(entry.tokens_per_s, 1), format_spread(entry.ttft_s, 3))
        )
    return format_table(rows, left_columns=())


def format_decode(result: BenchmarkResult) -> str:
    """A row per depth."""
    rows: list[tuple[str, ...]] = [
        (
            "decode",
            "tokens/s, steps alone",
            "tokens/s, end to end",
            "step p50",
            "p99",
            "token p50",
            "p99",
            "MB/step",
            "GB/s",
            "floor",
            "reached",
        )
    ]
    rows += [format_decode_row(entry) for entry in result.decode]
    table = format_table(rows, left_columns=())
    return f"{table}\nsteps, tokens and floor in ms; reached is the floor over the median step"


def format_decode_row(entry: DecodeResult) -> tuple[str, ...]:
    """One depth."""
    return (
        f"depth {entry.depth:,}",
        format_spread(entry.tokens_per_s, 1),
        format_spread(entry.end_to_end_tokens_per_s, 1),
        f"{entry.step.p50_ms:.2f}",
        f"{entry.step.p99_ms:.2f}",
        f"{entry.token.p50_ms:.2f}",
        f"{entry.token.p99_ms:.2f}",
        f"{entry.bytes_per_step / 1e6:,.1f}",
        f"{entry.gb_per_s:.1f}",
        f"{entry.floor_ms:.2f}",
        f"{entry.share:.0%}",
    )


def format_breakdown(breakdown: Breakdown) -> str:
    """A row per part of a step."""
    rows: list[tuple[str, ...]] = [(f"step at depth {breakdown.depth:,}", "ms", "share", "MB read", "GB/s")]
    for part in breakdown.parts:
        megabytes = f"{part.bytes_read / 1e6:,.1f}" if part.bytes_read else ""
        rate = f"{part.bytes_read / part.ms / 1e6:.1f}" if part.bytes_read and part.ms > 0 else ""
        rows.append((part.name, f"{part.ms:.3f}", f"{part.ms / breakdown.step_ms:.1%}", megabytes, rate))
    rows.append(("whole step", f"{breakdown.step_ms:.3f}", "100.0%", "", ""))
    return format_table(rows, left_columns=(0,))


def format_foot(result: BenchmarkResult) -> str:
    """The ceiling, what is counted, time, memory and notes."""
    bandwidth, memory = result.bandwidth, result.memory
    device = "" if memory.device_peak_bytes is None else f", {memory.device_peak_bytes / 1e9:.2f} GB of the GPU at most"
    resident = "" if memory.resident_bytes is None else f"{memory.resident_bytes / 1e9:.2f} GB resident, "
    rows = [
        (
            "ceiling",
            f"{bandwidth.ceiling_gb_per_s:.1f} GB/s, the higher of {format_spread(bandwidth.before_gb_per_s, 1)} read "
            f"before and {format_spread(bandwidth.after_gb_per_s, 1)} after the runs",
        ),
        (
            "counted",
            f"{result.model.weight_bytes_per_token / 1e6:,.1f} MB of weights and scales as stored and "
            f"{result.model.kv_bytes_per_token / 1e3:,.1f} kB of KV cache per token in it and row, once each per step",
        ),
        ("time", format_phases(result.phases)),
        ("memory", f"{resident}{memory.peak_resident_bytes / 1e9:.2f} GB at most{device}"),
        ("recompiles", f"{result.execution.recompiles}"),
        *([] if result.execution.other_load is None else [("other load", f"{result.execution.other_load:.1%}")]),
        *(("note", note) for note in result.notes),
    ]
    return "\n".join(f"{name:10} {text}" for name, text in rows)


def format_phases(phases: Phases) -> str:
    """The benchmark's own time by phase."""
    seconds = dataclasses.asdict(phases)
    wall_s = seconds.pop("wall_s")
    parts = [f"{name.removesuffix('_s').replace('_', ' ')} {value:.1f}" for name, value in seconds.items()]
    return f"{', '.join(parts)}: {wall_s:.1f} s"


def format_spread(spread: Spread, digits: int) -> str:
    """The median and what most runs lie between."""
    return f"{spread.median:,.{digits}f} ({spread.p10:,.{digits}f} to {spread.p90:,.{digits}f})"
