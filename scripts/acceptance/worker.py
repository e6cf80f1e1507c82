"""A section in a process of its own: `python -m acceptance.worker MODULE FILE LIMIT_S`.

The module's `run` is given the findings to add to. What it raises goes to standard error, as Python does it.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from acceptance.findings import Findings


def main(module: str, path: str, limit_s: str) -> None:
    """Run a section and save what it finds."""
    findings = Findings(Path(path), float(limit_s))
    importlib.import_module(module).run(findings)
    findings.note()


if __name__ == "__main__":
    main(*sys.argv[1:])
