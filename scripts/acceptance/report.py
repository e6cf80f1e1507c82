"""What all sections found, in Markdown."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from acceptance.findings import MEASURED, list_failed, read_json
from gptfast.kernels.cuda.configurations import StepKind
from gptfast.kernels.cuda.tuning import LEAST_GAIN

PROOF = {"kernels", "model_1b", "fused"}
"""The sections that must have passed for the fused step to be taken."""
GOALS = {
    "llama-3.1-8b": {"bf16": 0.85, "int8": 0.80, "int4": 0.75},
    "llama-3.2-1b": {"bf16": 0.75, "int8": 0.60, "int4": 0.45},
}
"""Shares of the read bandwidth that a token at depth 0 shall reach, by the model's shape and the kind of weights."""


def read_sections(names: Sequence[str], out: Path) -> list[dict[str, Any]]:
    """The objects of those that have a file, in order."""
    return [fields for name in names if (fields := read_json(out / f"{name}.json"))]


def format_report(sections: Sequence[Mapping[str, Any]]) -> str:
    """A title, how every section ended, which goals are reached, what failed with what to look at, and the tables."""
    blocks = ["# GPU acceptance", format_facts(sections), format_overview(sections)]
    blocks += ["## Goals", "\n".join(f"- {line}" for line in list_goals(sections))]
    failures = list_failures(sections)
    if failures:
        blocks += ["## What failed", "\n".join(f"- {failure}" for failure in failures)]
    for fields in sections:
        if fields["tables"]:
            blocks.append(f"## {fields['section']}")
        for table in fields["tables"]:
            blocks.append(f"### {table['title']}\n\n{format_markdown([table['columns'], *table['rows']])}")
    return "\n\n".join(block for block in blocks if block) + "\n"


def format_facts(sections: Sequence[Mapping[str, Any]]) -> str:
    """What the sections noted that is a word or a number, a line for each section."""
    lines = []
    for fields in sections:
        plain = {name: value for name, value in fields["facts"].items() if isinstance(value, str | int | float)}
        if plain:
            facts = ", ".join(f"{name} {format_value(value)}" for name, value in plain.items())
            lines.append(f"- {fields['section']}: {facts}")
    return "\n".join(lines)


def list_goals(sections: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each goal: the highest share that was measured, and whether it suffices."""
    measured = [line for fields in sections for line in fields["facts"].get(MEASURED, [])]
    lines = []
    for preset, goals in GOALS.items():
        for kind, goal in goals.items():
            found = [line for line in measured if (line["model"], line["kind"], line["depth"]) == (preset, kind, 0)]
            start = f"{preset}, {kind}: goal {goal:.0%} of the read bandwidth"
            if not found:
                lines.append(f"{start}, not measured")
                continue
            best = max(found, key=lambda line: line["share"])
            end = "reached" if best["share"] >= goal else "not reached"
            lines.append(f"{start}, {best['share']:.1%} measured ({best['weights']}): {end}")
    return lines


def choose_step(sections: Sequence[Mapping[str, Any]]) -> StepKind | None:
    """`fused` if that was right, and faster for every form and depth that both steps were timed at; None if not timed.

    The checks of the sections `kernels`, `model_1b` and `fused` must all have passed.
    """
    times: dict[tuple[Any, ...], dict[bool, float]] = defaultdict(dict)
    for fields in sections:
        for line in fields["facts"].get(MEASURED, []):
            if line.get("is_usual"):
                key = line["model"], line["matrices"], line["depth"]
                times[key][line["fused"]] = line["ms_per_token"]
    pairs = [each for each in times.values() if len(each) == len((True, False))]
    if not pairs:
        return None
    passed = {fields["section"] for fields in sections if fields["status"] == "passed"}
    is_faster = all(each[True] < (1 - LEAST_GAIN) * each[False] for each in pairs)
    return "fused" if passed >= PROOF and is_faster else "compiled"


def format_value(value: str | float) -> str:
    """A number with as many digits as mean something."""
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def format_overview(sections: Sequence[Mapping[str, Any]]) -> str:
    """A line for each section."""
    rows = [["section", "status", "checks passed", "seconds", "date"]]
    for fields in sections:
        n_checks = len(fields["checks"])
        passed = f"{n_checks - len(list_failed(fields))} of {n_checks}"
        rows.append([fields["section"], fields["status"], passed, f"{fields['seconds']:.0f}", fields["date"]])
    return format_markdown(rows)


def list_failures(sections: Sequence[Mapping[str, Any]]) -> list[str]:
    """Every check that failed and every section that did not end well, each with what to look at."""
    failures = []
    for fields in sections:
        name = fields["section"]
        failures += [
            f"{name}: {check['name']}: {check['found']}; look at {check['look_at']}" for check in list_failed(fields)
        ]
        if fields["error"]:
            status = fields["status"].replace("_", " ")
            lines = "\n".join(f"      {line}" for line in fields["error"])
            failures.append(f"{name}: {status}; look at {name}.log\n\n{lines}\n")
    return failures


def format_markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table whose first row is its head."""
    head, *body = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
