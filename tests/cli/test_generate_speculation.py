"""`gptfast generate --draft`: the text of plain decoding, what is reported beside it, and `--check-exact`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gptfast.cli.generate import print_check
from gptfast.config import SamplingConfig
from gptfast.generation import Stream, encode_prompt, generate, stream
from gptfast.runner import Runner
from gptfast.sampling import Sampler
from gptfast.session import Session
from tests.reference.sessions import PROMPT, CommandLine, complete, ids_of, load_tiny

pytestmark = pytest.mark.usefixtures("tiny_cache")

SPECULATION_FIELDS = {
    "rounds",
    "plain_steps",
    "proposed",
    "accepted",
    "acceptance",
    "mean_accepted_length",
    "accept_counts",
    "proposed_counts",
    "draft_s",
    "verify_s",
    "plain_s",
    "draft_ms_per_token",
    "verify_ms",
    "plain_ms",
    "break_even_acceptances",
}
NEW_TOKENS = 60
ASKED = ("--prompt", PROMPT, "--max-new-tokens", NEW_TOKENS, "--json")
SAMPLED = ("--num-samples", 2, "--temperature", 0.8, "--seed", 5)
SAMPLING = SamplingConfig(temperature=0.8, seed=5)
ITSELF = "itself"
"""As a draft: the path of the model."""


@pytest.fixture(scope="module")
def session(model: Path) -> Session:
    return load_tiny(model)


@pytest.fixture
def run(cli: CommandLine, model: Path) -> Callable[..., object]:
    """Runs `gptfast generate` on the tiny model in float32 on one thread; the draft `itself` is the same model."""

    def call(*arguments: str | int | float | Path, **settings: Any) -> object:
        given = [model if argument == ITSELF else argument for argument in arguments]
        return cli("generate", "--checkpoint", model, "--dtype", "float32", "--threads", 1, *given, **settings)

    return call


def list_draft_lines(stderr: str) -> list[str]:
    """What the report says of the draft, line by line."""
    return [line.removeprefix("draft").strip() for line in stderr.splitlines() if line.startswith("draft ")]


def list_verdicts(stderr: str) -> list[str]:
    """What `--check-exact` says, a line for each text."""
    return [line for line in stderr.splitlines() if line.startswith(("exact", "not exact"))]


# The text


@pytest.mark.parametrize("sampling", [(), ("--temperature", "0.8", "--seed", "5")], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "draft",
    [
        ("--draft", "layers:1", "--speculate-k", "3"),
        ("--draft", "ngram", "--speculate-k", "3"),
        ("--draft", "ngram,layers:1", "--speculate-k", "3"),
        ("--draft", "ngram,layers:1"),
        ("--draft", "int4", "--speculate-k", "auto"),
        ("--draft_checkpoint_path", ITSELF, "--speculate_k", "3"),
    ],
    ids=" ".join,
)
def test_the_text_is_that_of_plain_decoding(
    draft: tuple[str, ...], sampling: tuple[str, ...], run: CommandLine
) -> None:
    plain = run(*ASKED, *sampling)
    speculated = run(*ASKED, *sampling, *draft)
    assert speculated.exit_code == 0, speculated.stderr
    assert speculated.json["token_ids"] == plain.json["token_ids"]
    assert speculated.stdout.rpartition("\n{")[0] == plain.stdout.rpartition("\n{")[0]


def test_a_conversation_is_that_of_plain_decoding(run: CommandLine) -> None:
    asked = ("--interactive", "--max-new-tokens", 20, "--temperature", 0)
    questions = "Hello!\nHow are you?\n"
    plain, speculated = run(*asked, stdin=questions), run(*asked, "--draft", "ngram,layers:1", stdin=questions)
    assert speculated.exit_code == 0, speculated.stderr
    assert speculated.stdout == plain.stdout
    assert plain.stdout.strip()


# What is reported


@pytest.mark.parametrize("draft", ["layers:1", "ngram", ITSELF])
def test_the_figures_of_a_draft_add_up(draft: str, run: CommandLine, model: Path, session: Session) -> None:
    fields = run(*ASKED, "--draft", draft, "--speculate-k", 3).json
    name = str(model) if draft == ITSELF else draft
    assert list(fields["speculation"]) == [name]
    found = fields["speculation"][name]
    assert set(found) == SPECULATION_FIELDS
    # Prefill yields the first token, a round what it accepts and one more, any other step one.
    assert fields["new_tokens"] == NEW_TOKENS == 1 + found["accepted"] + found["rounds"] + found["plain_steps"]
    assert found["proposed"] == sum(found["proposed_counts"]) >= found["accepted"] == sum(found["accept_counts"]) > 0
    assert found["proposed_counts"][0] == found["rounds"] > 0
    assert len(found["proposed_counts"]) == len(found["accept_counts"]) == len(found["break_even_acceptances"]) == 3
    assert found["acceptance"] == found["accepted"] / found["proposed"]
    assert found["mean_accepted_length"] == (found["accepted"] + found["rounds"]) / found["rounds"]
    assert found["draft_s"] == pytest.approx(found["draft_ms_per_token"] * found["proposed"] / 1e3)
    assert found["verify_s"] == pytest.approx(found["verify_ms"] * found["rounds"] / 1e3)
    assert found["plain_s"] == pytest.approx(found["plain_ms"] * found["plain_steps"] / 1e3)
    decode_s = (NEW_TOKENS - 1) / fields["decode_tokens_per_s"]
    assert 0 < found["draft_s"] + found["verify_s"] + found["plain_s"] < decode_s

    read_bytes = (found["rounds"] + found["plain_steps"]) * session.weight_bytes_per_token
    if draft != "ngram":
        drafting = load_tiny(model, draft=name).speculator
        assert drafting is not None
        [runner] = drafting.list_runners()
        read_bytes += found["proposed"] * runner.model.count_weight_bytes_per_token()
    assert fields["weight_bytes_per_token"] == session.weight_bytes_per_token
    assert fields["bandwidth_gb_per_s"] == pytest.approx(read_bytes / decode_s / 1e9)


def test_the_figures_of_two_proposers_add_up(run: CommandLine) -> None:
    fields = run(*ASKED, "--draft", "ngram,layers:1", "--speculate-k", 3).json
    assert list(fields["speculation"]) == ["ngram", "layers:1"]
    first, second = fields["speculation"].values()
    assert first["rounds"] > 0
    assert second["rounds"] > 0
    # The second is asked where the first has no idea, and there is a plain step where neither has.
    assert first["plain_steps"] == second["rounds"] + second["plain_steps"]
    in_rounds = sum(found["accepted"] + found["rounds"] for found in (first, second))
    assert fields["new_tokens"] == NEW_TOKENS == 1 + in_rounds + second["plain_steps"]


def test_the_report_has_lines_on_every_proposer(run: CommandLine) -> None:
    outcome = run(*ASKED, "--draft", "ngram,layers:1", "--speculate-k", 3)
    lines = list_draft_lines(outcome.stderr)
    names = [line.split()[0] for line in outcome.stderr.splitlines()]
    assert names == ["run", "start", "prefill", "decode", "weights", *["draft"] * len(lines), "memory"]
    assert "MB read per step, " in outcome.stderr
    for name, found in outcome.json["speculation"].items():
        counts = " ".join(str(count) for count in found["accept_counts"] if count)
        start = lines.index(
            f"{name}: {found['accepted']} of {found['proposed']} tokens accepted ({found['acceptance']:.0%}), "
            f"by position {counts}"
        )
        assert lines[start + 1] == (
            f"rounds: {found['rounds']} of {found['mean_accepted_length']:.2f} tokens, {found['verify_ms']:.2f} ms to "
            f"verify and {found['draft_ms_per_token']:.2f} to propose each token"
        )
        assert lines[start + 2] == f"without: {found['plain_steps']} steps, {found['plain_ms']:.2f} ms a token"
    # The steps without the first were timed, so it is known from when on it pays.
    assert re.fullmatch(r"rounds of 3 proposed (break even at an acceptance of \d+%|pay at no acceptance)", lines[3])


def test_a_proposer_without_a_round_is_one_line(run: CommandLine) -> None:
    outcome = run("--prompt", PROMPT, "--max-new-tokens", 2, "--draft", "layers:1", "--speculate-k", 3)
    assert list_draft_lines(outcome.stderr) == ["layers:1: no rounds in 1 steps"]


# What is refused


@pytest.fixture
def _no_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("the model is loaded")

    monkeypatch.setattr("gptfast.session.load_model", fail)


@pytest.mark.usefixtures("_no_loading")
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--draft", "ngram", "--batch-size", "2"), ("one text at a time", "batch size 1")),
        (("--speculate-k", "3"), ("3 tokens", "nothing proposes them", "draft")),
        (("--draft", "ngram", "--speculate-k", "0"), ("0 tokens", "1 to 15")),
        (("--draft", "ngram", "--speculate-k", "99"), ("99 tokens", "1 to 15")),
        (("--draft", "ngram", "--speculate-k", "-1"), ("-1 tokens", "1 to 15")),
        (("--draft", "bogus"), ("draft bogus does not exist", "give ngram, int4, int8, layers:N")),
        (("--draft", "ngram,bogus"), ("draft bogus does not exist",)),
        (("--draft", "ngram,ngram"), ("'ngram,ngram'",)),
        (("--draft", ""), ("draft ''",)),
        (("--check-exact",), ("--check-exact", "give --draft")),
        (("--check-exact", "--draft", "ngram", "--interactive"), ("--check-exact", "no --interactive")),
    ],
    ids=" ".join,
)
def test_a_bad_setting_is_one_line_before_a_model_is_loaded(
    flags: tuple[str, ...], words: tuple[str, ...], run: CommandLine
) -> None:
    outcome = run(*flags)
    outcome.assert_refused(*words)
    assert len(outcome.stderr.splitlines()) == 1


@pytest.mark.usefixtures("_no_loading")
def test_a_k_that_is_no_number_is_a_usage_error(run: CommandLine) -> None:
    outcome = run("--draft", "ngram", "--speculate-k", "many")
    assert (outcome.exit_code, outcome.stdout) == (2, "")
    assert outcome.stderr.splitlines()[-1].endswith("'--speculate-k': 'many' is neither a number of tokens nor auto")


# --check-exact


@pytest.mark.parametrize("draft", ["layers:1", "ngram,layers:1", ITSELF])
def test_samples_of_a_piped_prompt_with_a_stop_string_are_said_to_be_exact(
    draft: str, run: CommandLine, session: Session
) -> None:
    free = generate(session, PROMPT, max_new_tokens=40, sampling=SAMPLING, num_samples=2)
    stop = free[0].text[12:15]
    settings = {"max_new_tokens": 40, "sampling": SAMPLING, "stop": stop}
    expected = generate(session, PROMPT, num_samples=2, **settings)
    assert expected[0].finish_reason == "stop"
    asked = ("--prompt", "-", "--max-new-tokens", 40, "--stop", stop, "--json")
    outcome = run(*asked, *SAMPLED, "--draft", draft, "--speculate-k", 3, "--check-exact", stdin=PROMPT)
    assert outcome.exit_code == 0, outcome.stderr
    assert [sample["text"] for sample in outcome.json["samples"]] == [result.text for result in expected]
    assert list_verdicts(outcome.stderr) == [
        f"exact: {result.new_tokens} tokens are those of plain decoding" for result in expected
    ]


@pytest.fixture
def _wrong_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first round moves the model's logits to other tokens, and makes them stronger than any noise."""
    verify = Runner.verify
    rounds = 0

    def moved(runner: Runner, tokens: Tensor, position: int) -> Tensor:
        nonlocal rounds
        logits = verify(runner, tokens, position)
        if runner.model.config.n_layers == 1:  # the draft reads the prompt in such a step
            return logits
        rounds += 1
        return 100 * logits.roll(1, dims=-1) if rounds == 1 else logits

    monkeypatch.setattr(Runner, "verify", moved)


def measure_margin(session: Session, prompt_ids: list[int], ids: list[int]) -> float:
    """How far the two largest logits are apart after the prompt and these ids, decoded one by one."""
    logits = session.runner.prefill(prompt_ids)
    for position, token in enumerate(ids, len(prompt_ids)):
        logits = session.runner.decode(torch.tensor([token]), position)
    session.cached_ids = []
    first, second = logits[0].sort(descending=True).values[:2].tolist()
    return first - second


@pytest.mark.usefixtures("_wrong_round")
def test_a_text_that_is_not_exact_is_told_with_its_token_and_margin_and_code_1(
    run: CommandLine, session: Session
) -> None:
    outcome = run(*ASKED, *SAMPLED, "--draft", "layers:1", "--speculate-k", 3, "--check-exact")
    wrong, right = (sample["token_ids"] for sample in outcome.json["samples"])
    samples = generate(session, PROMPT, max_new_tokens=NEW_TOKENS, sampling=SAMPLING, num_samples=2)
    plain = [result.token_ids for result in samples]
    # Prefill chooses the first token, and the first round the second.
    assert wrong[0] == plain[0][0]
    assert wrong[1] != plain[0][1]
    margin = measure_margin(session, encode_prompt(session, PROMPT), wrong[:1])
    assert list_verdicts(outcome.stderr) == [
        f"not exact: token 1 is {wrong[1]}, and {plain[0][1]} in plain decoding, where the two largest logits are "
        f"{margin:.3g} apart",
        f"exact: {NEW_TOKENS} tokens are those of plain decoding",
    ]
    assert tuple(right) == plain[1]
    # One wrong text is enough, and the figures are printed all the same.
    assert outcome.exit_code == 1
    assert list_draft_lines(outcome.stderr)


@pytest.mark.parametrize(("ours", "theirs"), [(5, 8), (8, 5)])
def test_a_text_that_ends_elsewhere_is_not_exact(
    ours: int, theirs: int, session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    speculated = stream(session, PROMPT, max_new_tokens=ours)
    assert "".join(speculated)
    assert not print_check(session, speculated, stream(session, PROMPT, max_new_tokens=theirs))
    ids = ids_of(session, PROMPT, 8)
    words = ("the end", str(ids[5])) if ours == 5 else (str(ids[5]), "the end")
    assert capsys.readouterr().err.startswith(f"not exact: token 5 is {words[0]}, and {words[1]} in plain decoding")


# Ctrl-C


def test_ctrl_c_during_the_check_keeps_the_text_and_its_figures(
    run: CommandLine, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = Stream._decode

    def interrupted(plain: Stream, sampler: Sampler, tokens: Tensor) -> Iterator[list[list[int]]]:
        steps = decode(plain, sampler, tokens)
        yield from (next(steps) for _ in range(5))
        raise KeyboardInterrupt

    expected = complete(session, PROMPT, NEW_TOKENS, sampling=SAMPLING)
    monkeypatch.setattr(Stream, "_decode", interrupted)
    outcome = run(*ASKED, *SAMPLED, "--draft", "layers:1", "--speculate-k", 3, "--check-exact")
    assert outcome.exit_code == 130
    fields = outcome.json
    # The second sample was not begun.
    assert "samples" not in fields
    assert fields["text"] == expected.text
    assert outcome.stdout.startswith(expected.text + "\n{")
    assert fields["finish_reason"] == "length"
    assert fields["speculation"]["layers:1"]["rounds"] > 0
    assert list_verdicts(outcome.stderr) == []
    assert len(list_draft_lines(outcome.stderr)) >= 3
    assert "Traceback" not in outcome.stderr


def test_a_text_that_ctrl_c_ended_is_not_checked(run: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    verify = Runner.verify
    calls = 0

    def interrupted(runner: Runner, tokens: Tensor, position: int) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise KeyboardInterrupt
        return verify(runner, tokens, position)

    monkeypatch.setattr(Runner, "verify", interrupted)
    outcome = run(*ASKED, "--draft", "layers:1", "--speculate-k", 3, "--check-exact")
    assert outcome.exit_code == 130
    fields = outcome.json
    assert fields["finish_reason"] == "interrupted"
    assert 0 < fields["new_tokens"] < NEW_TOKENS
    assert list_verdicts(outcome.stderr) == []
