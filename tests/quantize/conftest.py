from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gptfast.cli.main import execute
from tests.reference.sessions import Outcome, restored_logger, write_tiny_model


class Quantizer:
    """Runs `python quantize.py` in this process, in a directory of the test's own."""

    def __init__(self, patch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str]) -> None:
        self._patch = patch
        self._capture = capture

    def __call__(self, *arguments: str | int | Path) -> Outcome:
        """Run `quantize.py ARGUMENTS` and read what it printed."""
        from quantize.cli import command

        self._capture.readouterr()
        with self._patch.context() as patch, restored_logger("gptfast"):
            patch.setattr(sys, "argv", ["quantize.py", *map(str, arguments)])
            with pytest.raises(SystemExit) as ended:
                execute(command, "quantize.py")
        captured = self._capture.readouterr()
        code = ended.value.code
        return Outcome(code if isinstance(code, int) else int(code is not None), captured.out, captured.err)


@pytest.fixture
def quantizer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Quantizer:
    monkeypatch.chdir(tmp_path)
    return Quantizer(monkeypatch, capsys)


@pytest.fixture(scope="module")
def model(tiny_cache: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a tokenizer, in the Hugging Face layout and float32."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")
