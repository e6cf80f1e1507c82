"""What a section finds out, saved whenever something is added, so that a section that dies leaves what it had."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gptfast.cache import replace_atomically

MEASURED = "measured"
"""The fact that has an object for every time of a token: `model kind weights depth ms_per_token share`."""


@dataclass(frozen=True)
class Check:
    """Something that must hold.

    Attributes:
        name: what is held to be so.
        passed: whether it is.
        found: what was found, in a few words.
        look_at: where to begin if it failed.
    """

    name: str
    passed: bool
    found: str
    look_at: str


@dataclass(frozen=True)
class Table:
    """Figures for people; every row has a cell for each column."""

    title: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)


class Findings:
    """The facts, checks and tables of a section, kept in a file.

    Attributes:
        out: the directory of all sections' files.
        facts: by name, of what JSON has.
    """

    def __init__(self, path: Path, limit_s: float) -> None:
        self.out = path.parent
        self.facts: dict[str, Any] = {}
        self._path, self._end = path, time.monotonic() + limit_s
        self._checks: list[Check] = []
        self._tables: dict[str, Table] = {}

    @property
    def checks(self) -> tuple[Check, ...]:
        """All so far."""
        return tuple(self._checks)

    @property
    def failed(self) -> tuple[Check, ...]:
        """Those that failed so far."""
        return tuple(check for check in self._checks if not check.passed)

    @property
    def tables(self) -> tuple[Table, ...]:
        """All so far."""
        return tuple(self._tables.values())

    def get_remaining_s(self) -> float:
        """Seconds until the section is ended from outside."""
        return self._end - time.monotonic()

    def note(self, **facts: Any) -> None:
        """Add facts."""
        self.facts |= facts
        self._save()

    def check(self, name: str, passed: bool, found: str, look_at: str) -> None:
        """Add a check."""
        self._checks.append(Check(name, passed, found, look_at))
        self._save()

    def add_row(self, title: str, row: Mapping[str, str]) -> None:
        """Add a row, by column, to the table of that title, which begins with its first row."""
        table = self._tables.setdefault(title, Table(title, list(row)))
        assert list(row) == table.columns
        table.rows.append(list(row.values()))
        self._save()

    def _save(self) -> None:
        fields = {
            "facts": self.facts,
            "checks": [asdict(check) for check in self._checks],
            "tables": [asdict(table) for table in self._tables.values()],
        }
        write_json(self._path, fields)


def write_json(path: Path, fields: Mapping[str, Any]) -> None:
    """Write an object aside and have it take the place of the file."""
    with replace_atomically(path) as partial:
        partial.write_text(json.dumps(fields, indent=1) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file, or an empty one where there is no such file or it is damaged."""
    try:
        fields = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return fields if isinstance(fields, dict) else {}


def list_failed(fields: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The checks of a section's object that failed."""
    return [check for check in fields.get("checks", []) if not check["passed"]]
