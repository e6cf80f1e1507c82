from __future__ import annotations

from pathlib import Path

import pytest

from tests.reference.sessions import CommandLine, write_tiny_model


@pytest.fixture(scope="module")
def model(tiny_cache: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, with a chat template."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def base(tiny_cache: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model without a chat template."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "base", template=None)


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(monkeypatch, capsys)
