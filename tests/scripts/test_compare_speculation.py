from __future__ import annotations

import importlib.util
import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest

import gptfast.session
from gptfast.bench import bandwidth
from gptfast.errors import UserError
from gptfast.generation import GenerationResult
from gptfast.session import Session
from gptfast.speculation.controller import SpeculationStatistics
from gptfast.speculation.selection import open_speculator
from tests.reference.sessions import ROOT, load_tiny, random_prompt, run_process, start_process, write_tiny_model

SCRIPT = ROOT / "scripts" / "compare_speculation.py"
EAGER = ("--no-compile", "--dtype", "float32", "--threads", 1)

Main = Callable[..., int]


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("compare_speculation", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "compare_speculation", module)  # where dataclasses look their module up
        spec.loader.exec_module(module)
        yield module


@pytest.fixture
def main(script: ModuleType, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Main:
    """Runs the command on the tiny model in this process, with a probe of little memory."""
    monkeypatch.setitem(bandwidth.PROBE_BYTES, "cpu", 2**20)

    def run(*arguments: object, checkpoint: Path = directory) -> int:
        words = [str(each) for each in ("--checkpoint", checkpoint, *EAGER, *arguments)]
        code: int = script.main.main(words, standalone_mode=False)
        return code

    return run


def make_result(
    decode_s: float, *, prefill_s: float = 0.0, token_ids: Sequence[int] = (5, 6, 7, 8, 9), decode_steps: int = 4
) -> GenerationResult:
    """A run of known times."""
    return GenerationResult(
        text="",
        token_ids=tuple(token_ids),
        finish_reason="length",
        prompt_tokens=3,
        reused_tokens=0,
        ttft_s=prefill_s,
        prefill_s=prefill_s,
        decode_s=decode_s,
        decode_steps=decode_steps,
    )


DONE = SpeculationStatistics(
    rounds=10,
    plain_steps=3,
    proposed_counts=(10, 9, 6),  # one round of 1 token, three of 2, six of 3
    accept_counts=(8, 5, 2),
    draft_s=0.05,
    verify_s=0.2,
    plain_s=0.03,
    break_even_acceptances=(None, 0.5, 0.25),
)
IDLE = SpeculationStatistics(0, 9, (0, 0), (0, 0), 0.0, 0.0, 0.9, (None, None))


def build_report(script: ModuleType, *comparisons: Any) -> tuple[list[dict[str, Any]], str]:
    """The drafts' fields and the text of the report."""
    drafts = [script.build_fields(comparison) for comparison in comparisons]
    probe = {"median": 12.34}
    fields = {
        "date": "2026-11-30T23:17:59+00:00",
        "bandwidth": {"before_gb_per_s": probe, "after_gb_per_s": {"median": 11.9}},
        "prompts": "mixed",
        "prompt_count": 2,
        "runs": 3,
        "new_tokens": 5,
        "ignore_eos": True,
        "speculate_k": "auto",
        "interrupted": False,
        "drafts": drafts,
    }
    return drafts, script.format_report(fields)


def find_row(report: str, draft: str) -> list[str]:
    """The cells of a draft's row."""
    [line] = [line for line in report.splitlines() if line.strip().startswith(draft)]
    return line.removeprefix(" ").split()


def test_the_table_holds_the_medians_of_known_pairs(script: ModuleType) -> None:
    whole_s = {1: (1.0, 0.5, 2.0), 2: (1.25, 1.0, 2.0), 3: (0.25, 0.25, 0.5)}  # of speculation, where plain takes 1 s
    pairs = [
        script.Pair(prompt, run, make_result(0.8, prefill_s=0.2), make_result(0.6 * seconds, prefill_s=0.4 * seconds))
        for prompt, runs in whole_s.items()
        for run, seconds in enumerate(runs, start=1)
    ]
    [fields], report = build_report(script, script.Comparison("int4", pairs, {"int4": DONE}))
    assert [each["prompt"] for each in fields["ratios"]] == [1, 2, 3]
    assert fields["ratios"][0]["runs"] == pytest.approx([1.0, 2.0, 0.5])
    assert fields["ratio"] == pytest.approx(1.0)
    assert (fields["worst_ratio"], fields["worst_prompt"]) == (pytest.approx(0.8), 2)
    assert fields["plain_tokens_per_s"] == pytest.approx(4 / 0.8)
    assert fields["speculative_tokens_per_s"] == pytest.approx(4 / 0.6)
    assert fields["plain_step_ms"] == pytest.approx(200)
    speed = ["int4", "1.00", "0.80", "2", "5.0", "6.7", "200.00"]
    # 15 of 25 tokens; 25 tokens of 10 rounds; 50 ms for 25 tokens; 200 ms for 10 rounds
    proposer = ["10", "60.0%", "2.50", "2.000", "20.00", "25.0%", "(k", "=", "3)"]
    assert find_row(report, "int4") == [*speed, *proposer]
    assert "memory read at 12.3 GB/s before and 11.9 after" in report
    assert "texts differ" not in report


def test_a_second_proposer_has_a_row_and_one_without_rounds_has_dashes(script: ModuleType) -> None:
    pair = script.Pair(1, 1, make_result(1.0), make_result(1.0))
    proposers = {"ngram": IDLE, "layers:1": DONE}
    [fields], report = build_report(script, script.Comparison("ngram,layers:1", [pair], proposers))
    assert fields["proposers"]["ngram"]["acceptance"] is None
    assert find_row(report, "ngram,layers:1")[7:] == ["0", *"-----"]
    assert find_row(report, "then layers:1")[2:] == ["10", "60.0%", "2.50", "2.000", "20.00", "25.0%", "(k", "=", "3)"]


def test_the_first_of_a_pair_alternates(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []

    def decode(session: str, prompt: list[int], new_tokens: int, _ignore_eos: bool) -> str:
        calls.append((session, prompt[0]))
        return f"{session} {new_tokens}"

    monkeypatch.setattr(script, "decode", decode)
    pairs = list(script.run_pairs("P", "S", [[1], [2]], 3, 8, True))
    assert [session for session, _ in calls] == list("PSSPPS" + "SPPSSP")
    assert [prompt for _, prompt in calls] == [1] * 6 + [2] * 6
    assert [(pair.prompt, pair.run) for pair in pairs] == [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (2, 3)]
    assert {(pair.plain, pair.speculative) for pair in pairs} == {("P 8", "S 8")}


def test_statistics_are_those_of_the_pairs_alone(script: ModuleType, eager: Session, directory: Path) -> None:
    speculating = load_tiny(directory)
    drafts = {
        draft: open_speculator(draft, speculating.runner, speculating.checkpoint, speculating.tokenizer, k=3)
        for draft in ("layers:1", "ngram")
    }
    comparisons: list[Any] = []
    prompts = [random_prompt(9), random_prompt(40, seed=1)]
    script.compare(eager, speculating, drafts, prompts, 2, 20, True, comparisons)
    assert [comparison.draft for comparison in comparisons] == ["layers:1", "ngram"]
    for comparison in comparisons:
        assert len(comparison.pairs) == 4
        assert all(pair.is_equal and len(pair.plain.token_ids) == 20 for pair in comparison.pairs)
        [(name, done)] = comparison.proposers.items()
        assert name == comparison.draft
        # Prefill yields the first token of each text.
        assert done.accepted + done.rounds + done.plain_steps == 4 * 19
    assert comparisons[0].proposers["layers:1"].rounds > 0


def test_texts_that_differ_are_reported_with_code_1(
    main: Main, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    sessions: list[Session] = []

    def load(*arguments: Any, **settings: Any) -> Session:
        session = load_tiny(*arguments, **settings)
        if sessions:
            session.runner.model.norm.weight.neg_()  # the likeliest token becomes the least likely
        sessions.append(session)
        return session

    monkeypatch.setattr(gptfast.session, "load", load)
    file = tmp_path / "figures.json"
    arguments = ("--draft", "ngram", "--limit", 1, "--runs", 2, "--max-new-tokens", 4, "--json", file)
    assert main(*arguments) == 1
    captured = capsys.readouterr()
    assert "texts differ: ngram, prompt 1, pair 2, after 0 equal tokens" in captured.out
    assert "pair 1 of 2: texts differ" in captured.err
    [draft] = json.loads(file.read_text())["drafts"]
    assert draft["differences"] == [{"prompt": 1, "run": run, "equal_tokens": 0} for run in (1, 2)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--draft", "ngram", "--draft", "nothing"), "the draft nothing does not exist"),
        (("--draft", "layers:2"), "layers:1"),
        (("--draft", "ngram", "--speculate-k", 99), "99 tokens cannot be speculated"),
        (("--draft", "ngram", "--max-new-tokens", 5000), "context is 2304"),
        (("--draft", "ngram", "--weights", "int3"), "weights 'int3' is not supported"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is(
    main: Main, capsys: pytest.CaptureFixture[str], arguments: tuple[object, ...], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        main(*arguments)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "pair" not in captured.err


@pytest.mark.parametrize(
    "arguments", [(), ("--draft", "ngram", "--speculate-k", "many"), ("--draft", "ngram", "--prompts", "all")]
)
def test_wrong_options_are_usage_errors(main: Main, arguments: tuple[object, ...]) -> None:
    with pytest.raises(click.UsageError):
        main(*arguments)


def test_a_model_without_a_chat_template_is_refused(main: Main, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no chat template"):
        main("--draft", "ngram", checkpoint=write_tiny_model(tmp_path / "base", template=None))


def test_the_command_measures_every_draft_and_writes_the_figures(directory: Path, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    outcome = run_process(
        *(SCRIPT, "--checkpoint", directory, *EAGER, "--draft", "ngram", "--draft", "layers:1", "--speculate_k", 2),
        *("--prompts", "copy_edit", "--limit", 2, "--runs", 1, "--max-new-tokens", 12, "--ignore-eos", "--json", file),
    )
    assert outcome.exit_code == 0, outcome.stderr
    assert "2 copy_edit prompts, 12 new tokens, speculate-k 2" in outcome.stdout
    fields = json.loads(file.read_text())
    assert (fields["prompts"], fields["prompt_count"], fields["speculate_k"]) == ("copy_edit", 2, 2)
    assert fields["environment"]["threads"] == 1
    assert fields["bandwidth"]["ceiling_gb_per_s"] > 0
    for draft, name in zip(fields["drafts"], ("ngram", "layers:1"), strict=True):
        assert draft["draft"] == name
        assert find_row(outcome.stdout, name)[:2] == [name, f"{draft['ratio']:.2f}"]
        assert [len(each["runs"]) for each in draft["ratios"]] == [1, 1]
        assert draft["differences"] == []
    assert fields["drafts"][1]["proposers"]["layers:1"]["usual_k"] == 2


def test_ctrl_c_prints_what_there_is_with_code_130(directory: Path) -> None:
    process = start_process(
        SCRIPT, "--checkpoint", directory, *EAGER, "--draft", "ngram", "--runs", 10_000, "--max-new-tokens", 50
    )
    with process:
        assert process.stderr is not None
        while "pair 2 of" not in (line := process.stderr.readline()):
            assert line, "it ended early"
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted: some pairs are missing" in stdout
    assert float(find_row(stdout, "ngram")[1]) > 0
    assert "Traceback" not in stderr
