"""What the runs say, as one object with the same keys whatever is missing, and as tables."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from gptfast.bench.statistics import summarize_runs
from gptfast.cli.tables import format_table
from peers.turns import PeerRecord, Workload

OURS = "gptfast"


def build_peer_fields(
    record: PeerRecord, ours: PeerRecord, decode: Workload, prefills: Mapping[int, Workload]
) -> dict[str, Any]:
    """One peer's part of the object; figures that there are not are null."""
    facts = record.facts
    runs, our_runs = record.runs.get(decode.name), ours.runs.get(decode.name)
    return {
        "status": record.status,
        "reason": record.reason,
        "version": facts.version if facts else None,
        "settings": facts.settings if facts else None,
        "decode": build_figures(record, ours, decode),
        "prefill": {str(length): build_figures(record, ours, workload) for length, workload in prefills.items()},
        "agreeing_tokens": count_agreeing(runs[-1].token_ids, our_runs[-1].token_ids) if runs and our_runs else None,
    }


def build_figures(record: PeerRecord, ours: PeerRecord, workload: Workload) -> dict[str, Any]:
    """A peer's rates in a workload, those of its own clock, and how many times as fast gptfast was in the same turn."""
    runs, our_runs = record.runs.get(workload.name, []), ours.runs.get(workload.name, [])
    rates = [workload.get_tokens_per_s(run) for run in runs]
    own_rates = [rate for run in runs if (rate := workload.get_own_tokens_per_s(run)) is not None]
    ratios = [workload.get_tokens_per_s(run) / rate for run, rate in zip(our_runs, rates, strict=False)]
    ratio = summarize_runs(ratios) if ratios else None
    return {
        "tokens_per_s": summarize_rates(rates),
        "own_tokens_per_s": summarize_rates(own_rates),
        "ratio": None if ratio is None else {"median": ratio.median, "p10": ratio.p10, "p90": ratio.p90},
    }


def summarize_rates(rates: Sequence[float]) -> dict[str, Any] | None:
    """The middle, the ends and all of them in order; None of nothing."""
    if not rates:
        return None
    return {"median": statistics.median(rates), "least": min(rates), "most": max(rates), "runs": list(rates)}


def count_agreeing(ids: Sequence[int], others: Sequence[int]) -> int:
    """How many tokens two texts have in common before they part."""
    pairs = zip(ids, others, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(others)))


def format_report(fields: Mapping[str, Any]) -> str:
    """The object as tables, a line for what ran, and what the figures count."""
    environment, bandwidth, new_tokens = fields["environment"], fields["bandwidth"], fields["new_tokens"]
    peers: Mapping[str, Any] = fields["peers"]
    blocks = [
        f"{fields['checkpoint']}, {fields['threads']} threads on {environment['device_name']}, {fields['date'][:10]}\n"
        f"read bandwidth {bandwidth['before_gb_per_s']['median']:.1f} GB/s before and "
        f"{bandwidth['after_gb_per_s']['median']:.1f} after all runs\n"
        f"runs of each peer, in turns: {fields['runs']}; medians (least to most); "
        f"ratio: {OURS} / peer within a turn (p10 to p90)",
        format_figures(
            f"decode {new_tokens} tokens after {fields['prompt_tokens']}",
            {name: peer["decode"] for name, peer in peers.items()},
        ),
    ]
    blocks += [
        format_figures(f"prefill {length} tokens", {name: peer["prefill"][str(length)] for name, peer in peers.items()})
        for length in fields["prefill_tokens"]
    ]
    blocks += ["\n".join(describe_peer(name, peer, new_tokens) for name, peer in peers.items())]
    return "\n\n".join(blocks)


def format_figures(title: str, figures: Mapping[str, Mapping[str, Any]]) -> str:
    """The table of a workload; a dash where a peer has no figure."""
    rows = [[title, "tokens/s", "own clock", "ratio"]]
    for name, figure in figures.items():
        rate, own, ratio = figure["tokens_per_s"], figure["own_tokens_per_s"], figure["ratio"]
        rows.append(
            [
                name,
                f"{rate['median']:.1f} ({rate['least']:.1f} to {rate['most']:.1f})" if rate else "-",
                f"{own['median']:.1f}" if own else "-",
                f"{ratio['median']:.2f} ({ratio['p10']:.2f} to {ratio['p90']:.2f})" if ratio and name != OURS else "-",
            ]
        )
    return format_table(rows, left_columns=[0])


def describe_peer(name: str, peer: Mapping[str, Any], new_tokens: int) -> str:
    """Version and settings, and what went wrong."""
    parts = [peer["reason"]] if peer["reason"] else []
    if peer["version"] is not None:
        parts.insert(0, f"{peer['version']}, {peer['settings']}")
    if peer["agreeing_tokens"] is not None and name != OURS:
        parts.append(f"the first {peer['agreeing_tokens']} of {new_tokens} tokens are those of {OURS}")
    return f"{name}: {'; '.join(parts)}"
