"""The ways to start the program: a launcher in the root, the package as a module, from any directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reference.sessions import ROOT, run_process


def test_a_launcher_is_the_command_itself(tmp_path: Path) -> None:
    outcome = run_process(ROOT / "generate.py", "--help", cwd=tmp_path, PYTHONPATH="")
    assert outcome.exit_code == 0, outcome.stderr
    assert outcome.stdout.startswith("Usage: generate.py [OPTIONS]")
    assert "--max-new-tokens" in outcome.stdout


def test_a_launcher_takes_flags_in_snake_case_and_refuses_in_one_line(tmp_path: Path) -> None:
    outcome = run_process(ROOT / "generate.py", "--max_new_tokens", -1, cwd=tmp_path, PYTHONPATH="")
    outcome.assert_refused("max-new-tokens is -1")


def test_the_package_runs_as_a_module(tmp_path: Path) -> None:
    outcome = run_process("-m", "gptfast", "generate", "--help", cwd=tmp_path)
    assert outcome.exit_code == 0, outcome.stderr
    assert outcome.stdout.startswith("Usage: gptfast generate [OPTIONS]")


def test_the_package_runs_as_a_module_with_an_exit_code(tmp_path: Path) -> None:
    outcome = run_process("-m", "gptfast", "generate", "--num_samples", 0, cwd=tmp_path)
    outcome.assert_refused("num-samples is 0")


@pytest.mark.parametrize("name", ["generate.py", "quantize.py"])
def test_launchers_hold_no_logic(name: str) -> None:
    assert len((ROOT / name).read_text().splitlines()) <= 6
