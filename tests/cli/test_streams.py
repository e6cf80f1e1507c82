"""Streams that are closed or full, and outputs that cannot be written: one line and exit code 2."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.reference.sessions import (
    ENVIRONMENT,
    PROMPT,
    ROOT,
    CommandLine,
    Outcome,
)

pytestmark = pytest.mark.usefixtures("tiny_cache")

FULL = Path("/dev/full")
"""Linux's device that answers every write with "No space left on device"."""


def run_redirected(redirection: str, *arguments: str | int | Path) -> Outcome:
    """Run `gptfast ARGUMENTS REDIRECTION` as a shell does."""
    finished = subprocess.run(
        ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-m", "gptfast", *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )
    return Outcome(finished.returncode, finished.stdout, finished.stderr)


@pytest.mark.parametrize("flags", [("--prompt", "-"), ("--prompt-file", "-"), ("--interactive",)], ids=" ".join)
def test_a_closed_standard_input_is_one_line(flags: tuple[str, ...], model: Path) -> None:
    outcome = run_redirected("<&-", "generate", "--checkpoint", model, "--dtype", "float32", *flags)
    outcome.assert_refused("standard input is closed", "--prompt")
    assert len(outcome.stderr.splitlines()) == 1


@pytest.mark.skipif(not FULL.exists(), reason="only Linux has a device that is always full")
@pytest.mark.parametrize(
    "arguments",
    [("--version",), ("--help",), ("inspect", "llama-3-8b"), ("inspect", "llama-3-8b", "--json")],
    ids=" ".join,
)
def test_a_full_disk_is_one_line(arguments: tuple[str, ...]) -> None:
    outcome = run_redirected(f"> {FULL}", *arguments)
    outcome.assert_refused("No space left on device", "check")
    assert len(outcome.stderr.splitlines()) == 1


@pytest.mark.skipif(not FULL.exists(), reason="only Linux has a device that is always full")
def test_a_text_for_a_full_disk_is_one_line(model: Path) -> None:
    asked = ("--dtype", "float32", "--threads", 1, "--prompt", PROMPT, "--max-new-tokens", 5, "--json")
    outcome = run_redirected(f"> {FULL}", "generate", "--checkpoint", model, *asked)
    outcome.assert_refused("No space left on device")
    assert len(outcome.stderr.splitlines()) == 1


def test_without_standard_input_a_given_prompt_is_completed(model: Path) -> None:
    asked = ("--dtype", "float32", "--threads", 1, "--prompt", PROMPT, "--max-new-tokens", 5)
    outcome = run_redirected("<&-", "generate", "--checkpoint", model, *asked)
    assert outcome.exit_code == 0, outcome.stderr
    assert outcome.stdout


@pytest.mark.parametrize("path", ["/proc/nope.json", "nowhere/trace.json"])
def test_a_profile_that_cannot_be_written_is_refused_before_the_model_is_loaded(
    path: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("the model is loaded")

    monkeypatch.setattr("gptfast.session.load", fail)
    monkeypatch.chdir(tmp_path)
    outcome = CommandLine(monkeypatch, capsys)("generate", "--checkpoint", model, "--prompt", PROMPT, "--profile", path)
    outcome.assert_refused(path)
