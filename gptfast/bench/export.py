"""A result for other programs: one JSON object, or a CSV row per measurement."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Mapping
from typing import Any

from gptfast.bench.results import BenchmarkResult


def to_json(result: BenchmarkResult) -> dict[str, Any]:
    """All of the result, nested as its dataclasses are; the keys are the same for every run."""
    return dataclasses.asdict(result)


def to_csv(result: BenchmarkResult) -> str:
    """A header and a row per prompt length and per depth, each with all that tells it from those of other runs.

    Columns are joined of the names in the JSON (`tokens_per_s_median`); a cell is empty where a column is not of
    that kind of measurement.
    """
    fields = to_json(result)
    facts = {"date": fields["date"]}
    facts |= {
        f"{group}_{name}": value
        for group in ("environment", "model", "execution")
        for name, value in fields[group].items()
    }
    swept = ("prompt_lengths", "depths")
    facts |= {name: value for name, value in fields["settings"].items() if name not in swept}
    facts |= {"ceiling_gb_per_s": result.bandwidth.ceiling_gb_per_s, "bandwidth_drift": result.bandwidth.drift}
    rows = [facts | {"phase": phase} | flatten(entry) for phase in ("prefill", "decode") for entry in fields[phase]]
    text = io.StringIO()
    columns = list(dict.fromkeys(column for row in rows for column in row))
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def flatten(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of nested mappings, their names joined with underscores."""
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}_{inner}": leaf for inner, leaf in flatten(value).items()}
        else:
            flat[name] = value
    return flat
