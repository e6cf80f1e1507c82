"""`gptfast bench startup`: real starts of the tiny model, refusals, Ctrl-C."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from gptfast.bench.environment import Environment
from gptfast.bench.startup import Start, StartupResult
from gptfast.cli.bench_startup import PARTS
from tests.reference.sessions import CommandLine, Outcome, run_process, start_process

pytestmark = pytest.mark.usefixtures("tiny_cache")

STARTUP = ("bench", "startup")
EAGER = ("--no-compile", "--dtype", "float32", "--threads", 1)


def list_names(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


@pytest.fixture(scope="module")
def outcome(model: Path) -> Outcome:
    flags = (*EAGER, "--prompt-tokens", 5, "--cold", 1, "--repeats", 2, "--json")
    return run_process("-m", "gptfast", *STARTUP, "--checkpoint", model, *flags)


def test_the_parts_of_real_starts_add_up(outcome: Outcome) -> None:
    assert outcome.exit_code == 0, outcome.stderr
    cold = outcome.json["cold"]
    parts = ("interpreter_s", "import_s", "load_s", "compile_s", "first_step_s")
    assert cold["first_token_s"]["median"] == pytest.approx(sum(cold[part]["median"] for part in parts))
    for start in (cold, outcome.json["warm"]):
        for part in ("interpreter_s", "import_s", "load_s", "first_step_s", "teardown_s"):
            assert start[part]["median"] > 0
        assert start["compile_s"]["median"] == 0
    assert (cold["load_s"]["runs"], outcome.json["warm"]["load_s"]["runs"]) == (1, 2)


def test_a_table_for_people_comes_before_the_json(outcome: Outcome, model: Path) -> None:
    *table, _ = outcome.stdout.splitlines()
    assert table[0] == f"{model.name}, float32, eager, prompt of 5 tokens"
    median = outcome.json["warm"]["first_token_s"]["median"]
    [row] = [line.split() for line in table if line.startswith("first token ")]
    assert row[3] == f"{median:.3f}"
    for title in PARTS:
        assert sum(line.startswith(f"{title} ") for line in table) == 1


def test_the_json_has_all_fields_whatever_was_asked_for(outcome: Outcome) -> None:
    assert list(outcome.json) == list_names(StartupResult)
    assert list(outcome.json["environment"]) == list_names(Environment)
    assert list(outcome.json["warm"]) == list(outcome.json["cold"]) == list_names(Start)
    assert outcome.json["environment"]["threads"] == 1


def test_progress_goes_to_standard_error(outcome: Outcome) -> None:
    assert outcome.stderr.splitlines() == [
        "a first start, which is not counted",
        "cold start 1 of 1",
        "warm start 1 of 2",
        "warm start 2 of 2",
    ]


def test_without_cold_starts_the_fields_are_the_same(cli: CommandLine, model: Path, outcome: Outcome) -> None:
    without = cli(*STARTUP, "--checkpoint", model, *EAGER, "--cold", 0, "--repeats", 1, "--json")
    assert without.json["cold"] is None
    assert list(without.json) == list(outcome.json)
    assert list(without.json["warm"]) == list(outcome.json["warm"])
    [row] = [line.split() for line in without.stdout.splitlines() if line.startswith("load ")]
    assert row[1] == "-"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--prompt-tokens", 0), ("prompt-tokens is 0",)),
        (("--cold", -1), ("cold is -1",)),
        (("--repeats", 0), ("repeats is 0",)),
        (("--random", "llama-3.2-1b"), ("model", "llama-3.2-1b")),
    ],
)
def test_what_cannot_be_measured_is_refused(
    flags: Sequence[str | int], words: Sequence[str], cli: CommandLine, model: Path
) -> None:
    cli(*STARTUP, "--checkpoint", model, *EAGER, *flags).assert_refused(*words)


def test_the_error_of_a_started_process_is_shown_as_ours(cli: CommandLine, tmp_path: Path) -> None:
    refused = cli(*STARTUP, "--checkpoint", tmp_path / "nowhere", *EAGER)
    refused.assert_refused("nowhere")
    assert refused.stderr.count("error: ") == 1


def test_ctrl_c_ends_the_started_process_and_removes_its_cache(model: Path, tmp_path: Path) -> None:
    flags = ("--checkpoint", model, *EAGER, "--cold", 1000)
    # Without a compiler a cold start takes seconds.
    with start_process("-m", "gptfast", *STARTUP, *flags, TMPDIR=str(tmp_path), CXX="nowhere") as process:
        assert process.stderr is not None
        while process.stderr.readline() != "cold start 2 of 1000\n":
            assert process.poll() is None
        while not list(tmp_path.glob("gptfast-cold-*")):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        stdout, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_a_request_to_end_takes_the_started_process_along(model: Path, tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    arguments = ("-m", "gptfast", "bench", "startup", "--checkpoint", model, "--no-compile", "--repeats", 50)
    with start_process(*arguments, TMPDIR=str(temporary)) as process:
        assert process.stderr is not None
        assert any("cold start" in line for line in iter(process.stderr.readline, ""))
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 130
    assert not list(temporary.glob("gptfast-cold-*"))
