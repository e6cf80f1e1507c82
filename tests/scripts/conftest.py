from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.reference.sessions import ROOT

# As it is for a script that is run: what stands beside it is imported by its name.
sys.path.append(str(ROOT / "scripts"))

from acceptance.findings import Findings


@pytest.fixture
def findings(tmp_path: Path) -> Findings:
    return Findings(tmp_path / "section.json", limit_s=1000)
