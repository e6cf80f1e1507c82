"""What a conversion did: typed, as text and as JSON."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gptfast.cli.tables import format_table

HEAD = "lm_head"


@dataclass(frozen=True)
class LayerReport:
    """One linear layer.

    Attributes:
        name: its canonical name.
        hf_name: the module's name in Hugging Face's words.
        shape: (out_features, in_features).
        precision: how it is stored, such as `int4 g32` or `bfloat16`.
        relative_error: the norm of what rounding changed over the norm of the matrix; 0 of a dense layer.
        note: why it is not stored as asked, or not rounded; None where nothing needs saying.
        is_skipped: whether it stays dense though it was to be rounded.
    """

    name: str
    hf_name: str
    shape: tuple[int, ...]
    precision: str
    relative_error: float
    note: str | None
    is_skipped: bool


@dataclass(frozen=True)
class Report:
    """A conversion.

    Attributes:
        source: the checkpoint that was read.
        output: the directory that was written.
        mode: as asked for: fp8, int8, int4, int4-hqq or int4-gptq.
        precision: the scheme that was asked for.
        source_bytes: of the source's tensors.
        stored_bytes: of the tensors that were written.
        stored_weights: numbers that these stand for, those of a head that was tied included.
        duration_s: from the opened checkpoint to the renamed directory.
        warnings: what was said before the work began.
        layers: every linear layer.
    """

    source: str
    output: str
    mode: str
    precision: str
    source_bytes: int
    stored_bytes: int
    stored_weights: int
    duration_s: float
    warnings: tuple[str, ...]
    layers: tuple[LayerReport, ...]

    @property
    def bits_per_weight(self) -> float:
        """Of all that is stored: scales, embeddings and norms included."""
        return 8 * self.stored_bytes / self.stored_weights

    @property
    def skipped(self) -> list[LayerReport]:
        """The layers that were to be rounded and were not."""
        return [layer for layer in self.layers if layer.is_skipped]

    def to_json(self) -> dict[str, Any]:
        """The fields of this report, and `bits_per_weight`."""
        return dataclasses.asdict(self) | {"bits_per_weight": self.bits_per_weight}


def format_report(report: Report) -> str:
    """The errors of all layers, a row per block, and a few aligned lines."""
    counts = Counter(layer.precision for layer in report.layers)
    rows = [
        ("layers", ", ".join(f"{count} {precision}" for precision, count in counts.most_common())),
        ("size", f"{report.stored_bytes / 1e6:,.1f} MB, {report.bits_per_weight:.2f} bits per weight"),
        ("source", f"{report.source}, {report.source_bytes / 1e6:,.1f} MB"),
        ("time", f"{report.duration_s:.1f} s"),
        *(("note", line) for line in list_notes(report.layers)),
    ]
    lines = "\n".join(f"{name:7} {value}" for name, value in rows)
    return f"{format_errors(report.layers)}\n\n{lines}"


def format_errors(layers: Sequence[LayerReport]) -> str:
    """A table of what rounding changed, in percent of each matrix's norm: a row per block, a column per matrix."""
    blocks: dict[str, dict[str, str]] = {}
    for layer in layers:
        *block, column = layer.hf_name.removeprefix("model.layers.").split(".", 1)
        row = block[0] if block else column
        blocks.setdefault(row, {})[column.rpartition(".")[2]] = describe_error(layer)
    columns = [column for column in dict.fromkeys(name for row in blocks.values() for name in row) if column != HEAD]
    rows = [("error in %", *columns)]
    rows += [(name, *(cells.get(column, "") for column in columns)) for name, cells in blocks.items() if name != HEAD]
    if HEAD in blocks:
        rows.append((HEAD, blocks[HEAD][HEAD], *[""] * (len(columns) - 1)))
    return format_table(rows, left_columns=(0,))


def describe_error(layer: LayerReport) -> str:
    """The error in percent, or that there is none."""
    return f"{100 * layer.relative_error:.2f}" if layer.precision.startswith(("int", "fp")) else "dense"


def list_notes(layers: Sequence[LayerReport]) -> list[str]:
    """What is not stored as asked and why, layers of the same reason together."""
    names: dict[str, list[str]] = {}
    for layer in layers:
        if layer.note is not None:
            names.setdefault(f"{layer.precision}, {layer.note}", []).append(layer.hf_name)
    return [f"{reason}: {', '.join(modules)}" for reason, modules in names.items()]
