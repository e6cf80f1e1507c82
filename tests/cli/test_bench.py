from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from tests.reference.sessions import CommandLine

QUICK = ["--dtype", "float32", "--repeats", "3", "--new-tokens", "4", "--prompt-lengths", "8", "--depths", "0,40"]


@pytest.fixture(autouse=True)
def _small_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gptfast.bench.bandwidth.PROBE_BYTES", {"cpu": 2**20})


def test_tables_go_to_standard_output_and_progress_to_standard_error(cli: CommandLine, model: Path) -> None:
    outcome = cli("bench", "--checkpoint", model, "--no-compile", *QUICK)
    assert outcome.exit_code == 0
    lines = outcome.stdout.splitlines()
    assert lines[0].startswith(f"{model.name}, ")
    assert lines[0].endswith("eager")
    assert "10 % to 90 % of the runs" in lines[2]
    for word in ("prefill", "8 tokens", "decode", "depth 0", "depth 40", "ceiling", "counted", "time", "memory"):
        assert any(line.lstrip().startswith(word) for line in lines), word
    assert "mean" not in outcome.stdout
    assert outcome.stderr.splitlines()[-2:] == ["run 3 of 3", "measuring the read bandwidth"]


def test_json_is_the_last_line(cli: CommandLine, model: Path) -> None:
    outcome = cli("bench", "--checkpoint", model, "--no-compile", "--json", *QUICK)
    fields = outcome.json
    assert [entry["depth"] for entry in fields["decode"]] == [0, 40]
    assert fields["settings"]["repeats"] == 3
    assert fields["breakdown"] is None
    phases = fields["phases"]
    named = sum(seconds for name, seconds in phases.items() if name not in ("wall_s", "other_s"))
    assert named + phases["other_s"] == pytest.approx(phases["wall_s"])
    assert phases["other_s"] >= 0


def test_csv_is_all_of_standard_output(cli: CommandLine, model: Path) -> None:
    outcome = cli("bench", "--checkpoint", model, "--no-compile", "--csv", *QUICK)
    rows = list(csv.DictReader(io.StringIO(outcome.stdout)))
    assert [row["phase"] for row in rows] == ["prefill", "decode", "decode"]
    assert {(row["repeats"], row["new_tokens"], row["temperature"]) for row in rows} == {("3", "4", "0.0")}
    assert all(float(row["bandwidth_drift"]) >= 0 for row in rows)


def test_a_compiled_step_is_taken_apart_and_drawn(cli: CommandLine, model: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "bench.png"
    outcome = cli("bench", "--checkpoint", model, "--plot", picture, *QUICK)
    assert outcome.exit_code == 0, outcome.stderr
    assert outcome.stdout.splitlines()[0].split("compiled (")[1] in ("cold)", "cached)")
    assert "feed_forward.w13" in outcome.stdout
    assert "unaccounted" in outcome.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [picture]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--repeats", 2], "repeats is 2"),
        (["--new-tokens", 0], "new-tokens is 0"),
        (["--prompt-lengths", 0], "a prompt of 0 tokens"),
        (["--depths", 4000], "do not fit the model's context"),
        (["--prompt-lengths", 4000], "do not fit the model's context"),
        (["--csv", "--json"], "both --csv and --json"),
        (["--csv", "--breakdown"], "--csv has no rows for --breakdown"),
        (["--random", "llama-3.2-1b"], "give one"),
        (["--batch-size", 0], "batch size is 0"),
        (["--temperature", -1], "temperature is -1"),
        (["--dtype", "int3"], "int3"),
        (["startup", "--repeats", 3], "--checkpoint stands before startup"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str | int], words: str, cli: CommandLine, model: Path
) -> None:
    outcome = cli("bench", "--checkpoint", model, "--no-compile", *arguments)
    assert outcome.exit_code == 2
    assert outcome.stdout == ""
    assert words in outcome.stderr.splitlines()[-1]


@pytest.mark.parametrize("text", ["a", "1,", "1;2", "-1", "1.5", ""])
def test_lists_of_counts_are_numbers_and_commas(text: str, cli: CommandLine) -> None:
    outcome = cli("bench", "--depths", text)
    assert outcome.exit_code == 2
    assert "is not a list of numbers such as 0,512,2048" in outcome.stderr


def test_help_names_the_subcommand_and_the_defaults(cli: CommandLine) -> None:
    outcome = cli("bench", "--help")
    assert outcome.exit_code == 0
    assert "startup" in outcome.stdout
    assert "[default: 64,512]" in outcome.stdout
