"""What an evaluation found and on what, for people and as JSON."""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Sequence
from typing import Any

import torch

from gptfast.bench.environment import describe_environment
from gptfast.bench.results import describe_precision
from gptfast.cli.tables import format_table
from gptfast.evaluation.comparison import Comparison
from gptfast.evaluation.harness import TaskMetric
from gptfast.evaluation.perplexity import Perplexity
from gptfast.evaluation.statistics import Estimate
from gptfast.session import Session


def describe_session(session: Session) -> dict[str, Any]:
    """What ran, and on what: the fields that both commands print."""
    environment = describe_environment(session.runner.device, torch.get_num_threads())
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "checkpoint": str(session.checkpoint.path),
        "device": environment.device,
        "device_name": environment.device_name,
        "dtype": session.dtype,
        "weights": session.weights,
        "activations": session.activations,
        "kv_dtype": session.kv_dtype,
        "kernels": session.kernels,
        "compiled": session.runner.is_compiled,
        "threads": environment.threads,
        "torch": environment.torch,
        "gptfast": environment.gptfast,
        "commit": environment.commit,
    }


def to_json(result: Perplexity, comparison: Comparison | None) -> dict[str, Any]:
    """The documented figures; those of a comparison are null without one."""
    absent = dict.fromkeys(field.name for field in dataclasses.fields(Comparison))
    return dataclasses.asdict(result) | (absent if comparison is None else dataclasses.asdict(comparison))


def format_perplexity(facts: dict[str, Any], result: Perplexity, comparison: Comparison | None) -> str:
    """A few aligned lines."""
    rows = [
        ("model", describe_model(facts)),
        (
            "text",
            f"{facts['text']} (sha256 {facts['text_sha256']}), {facts['tokens']} of {facts['text_tokens']} tokens",
        ),
        (
            "windows",
            f"{facts['windows']} of {facts['window_tokens']} tokens, stride {facts['stride_tokens']}, "
            f"{facts['scored_tokens']} tokens scored",
        ),
        ("nll", f"{format_estimate(result.nll_nats_per_token)} nats per token"),
        ("perplexity", format_estimate(result.perplexity)),
    ]
    if comparison is not None:
        of_base = (facts[f"against_{name}"] for name in ("weights", "activations", "kv_dtype"))
        rows += [
            ("base", f"{facts['against']}, {describe_precision(facts['dtype'], *of_base)}"),
            ("base nll", f"{format_estimate(comparison.base_nll_nats_per_token)} nats per token"),
            ("base ppl", format_estimate(comparison.base_perplexity)),
            ("difference", f"{format_estimate(comparison.nll_difference_nats_per_token)} nats per token"),
            ("ratio", format_estimate(comparison.perplexity_ratio)),
            ("KL", f"{format_estimate(comparison.kl_nats_per_token)} nats per token"),
            ("top-1", f"{format_estimate(comparison.top1_agreement)} agree"),
        ]
    return "\n".join(f"{name:11} {value}" for name, value in rows)


def format_metrics(metrics: Sequence[TaskMetric]) -> str:
    """A table with a row for each figure."""
    rows: list[Sequence[str]] = [("task", "figure", "value", "questions", "solved before each")]
    for each in metrics:
        figure = each.metric if each.filter == "none" else f"{each.metric} ({each.filter})"
        counts = ("-" if count is None else str(count) for count in (each.questions, each.num_fewshot))
        rows.append((each.task, figure, format_estimate(each), *counts))
    return format_table(rows, left_columns=(0, 1, 2))


def describe_model(facts: dict[str, Any]) -> str:
    """What ran, in one line."""
    precision = describe_precision(*(facts[name] for name in ("dtype", "weights", "activations", "kv_dtype")))
    runs_on = f"{facts['threads']} threads" if facts["device"] == "cpu" else f"{facts['kernels']} kernels"
    return f"{facts['checkpoint']}, {facts['device']}, {precision}, {runs_on}, torch {facts['torch']}"


def format_estimate(estimate: Estimate | TaskMetric) -> str:
    """The value and its standard error, to four decimals or as many as two digits of the error take."""
    value, error = estimate.value, estimate.standard_error
    if error is None:
        return f"{value:.4f} (no standard error)"
    decimals = max(4, 1 - math.floor(math.log10(error))) if error > 0 else 4
    return f"{value:.{decimals}f} +- {error:.{decimals}f}"
