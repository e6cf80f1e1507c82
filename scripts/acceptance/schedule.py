"""Sections one after the other, each in a process of its own and within its part of the time.

An illegal address makes a process's GPU unusable to it, and a kernel that hangs cannot be left; so neither may cost
more than its own section.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from acceptance.findings import list_failed, read_json, write_json

SCRIPTS = Path(__file__).parents[1]
LAST_LINES = 15
LAST_BYTES = 8192

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Section:
    """A part of the run.

    Attributes:
        name: of its files.
        module: whose `run` is called with `Findings`.
        part_s: seconds of the usual budget that it may take; of another one, in proportion.
        least_s: seconds without which it is not begun.
    """

    name: str
    module: str
    part_s: float
    least_s: float


SECTIONS = (
    Section("device", "acceptance.device", part_s=30, least_s=15),
    Section("kernels", "acceptance.kernels", part_s=70, least_s=20),
    Section("table", "acceptance.table", part_s=75, least_s=20),
    Section("model_1b", "acceptance.model_1b", part_s=105, least_s=30),
    Section("fused", "acceptance.fused", part_s=35, least_s=20),
    Section("model_8b", "acceptance.model_8b", part_s=105, least_s=30),
    Section("baselines", "acceptance.baselines", part_s=60, least_s=20),
)
PARTIAL = ".partial.json"


def run_sections(sections: Sequence[Section], out: Path, budget_s: float, *, tell: Tell) -> None:
    """Run them in order and write `out`/NAME.json after each, NAME.log with what it printed, whatever becomes of it.

    A section may take its part and what those before it left. Ctrl-C ends the one that runs, which keeps what it had,
    and is raised again.
    """
    start = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    for section, end_s in zip(sections, plan_ends(sections, budget_s), strict=True):
        spent_s = time.monotonic() - start
        limit_s = choose_limit(section, spent_s, end_s, budget_s)
        if limit_s is None:
            fields = describe(section, "not_begun", 0, [f"{max(0, budget_s - spent_s):.0f} s were left for it"])
            write_json(out / f"{section.name}.json", fields)
            tell(f"{section.name}: not begun, as the time is up")
            continue
        tell(f"{section.name}: up to {limit_s:.0f} s")
        run_section(section, out, limit_s)
        fields = read_json(out / f"{section.name}.json")
        tell(f"{section.name}: {fields['status']} after {fields['seconds']:.0f} s")


def plan_ends(sections: Sequence[Section], budget_s: float) -> list[float]:
    """Until when, in seconds from the start, each may run if those before it take all of their time."""
    total = sum(section.part_s for section in sections)
    ends, sum_s = [], 0.0
    for section in sections:
        sum_s += section.part_s
        ends.append(budget_s * sum_s / total)
    return ends


def choose_limit(section: Section, spent_s: float, end_s: float, budget_s: float) -> float | None:
    """Seconds that it may take, its least at any rate; None where so many are not left."""
    left_s = budget_s - spent_s
    return None if left_s < section.least_s else min(left_s, max(section.least_s, end_s - spent_s))


def run_section(section: Section, out: Path, limit_s: float) -> None:
    """Run one section and write its file; see `run_sections`."""
    partial, log = out / f"{section.name}{PARTIAL}", out / f"{section.name}.log"
    partial.unlink(missing_ok=True)
    start = time.monotonic()
    status, error = "interrupted", ["it was interrupted"]
    try:
        with log.open("wb") as output:
            code = run_process(
                [sys.executable, "-m", "acceptance.worker", section.module, str(partial), str(limit_s)],
                output,
                limit_s,
            )
        if code is None:
            status, error = "timed_out", [f"it was ended after {limit_s:.0f} s", *read_last_lines(log)]
        elif code != 0:
            end = f"exit code {code}" if code > 0 else f"ended by {signal.Signals(-code).name}"
            status, error = "failed", [end, *read_last_lines(log)]
        else:
            status, error = ("failed" if list_failed(read_json(partial)) else "passed"), []
    finally:
        fields = describe(section, status, time.monotonic() - start, error) | {"limit_s": limit_s} | read_json(partial)
        write_json(out / f"{section.name}.json", fields)
        partial.unlink(missing_ok=True)


def run_process(command: Sequence[str], output: Any, limit_s: float) -> int | None:
    """The exit code of a command, negative for a signal; None if it had to be ended, with all that it started."""
    paths = [str(SCRIPTS), str(SCRIPTS.parent), os.environ.get("PYTHONPATH", "")]
    process = subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        # A process that was left by a worker, or by one that is dead, would hold memory of the GPU.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def describe(section: Section, status: str, seconds: float, error: Sequence[str]) -> dict[str, Any]:
    """A section's file, but for what it found."""
    return {
        "section": section.name,
        "status": status,
        "seconds": round(seconds, 1),
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "error": list(error),
        "facts": {},
        "checks": [],
        "tables": [],
    }


def read_last_lines(log: Path) -> list[str]:
    """The last lines of what a section printed."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return [line.rstrip() for line in lines if line.strip()][-LAST_LINES:]


def has_passed(section: Section, out: Path) -> bool:
    """Whether its file says so."""
    return read_json(out / f"{section.name}.json").get("status") == "passed"


def forget(section: Section, out: Path) -> None:
    """Remove its files."""
    for suffix in (".json", ".log", PARTIAL):
        (out / f"{section.name}{suffix}").unlink(missing_ok=True)
