"""`gptfast generate --interactive`: turns that reuse the cache, a history that outgrows the context, Ctrl-C."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gptfast.chat import Message
from gptfast.cli.interactive import ROOM_FOR_REPLY, forget_oldest
from gptfast.errors import PromptError
from gptfast.generation import Stream, encode_prompt, generate
from gptfast.runner import Runner
from gptfast.session import Session
from tests.reference.sessions import CommandLine, Outcome, load_tiny, write_tiny_model

pytestmark = pytest.mark.usefixtures("tiny_cache")

CONTEXT = 320
QUESTIONS = ["Hello world", "How are you?", "Once upon a time"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", context=CONTEXT)


@pytest.fixture(scope="module")
def session(model: Path) -> Session:
    return load_tiny(model)


@pytest.fixture
def talk(model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Talks to the tiny model, one question per line."""
    cli = CommandLine(monkeypatch, capsys)

    def run(questions: list[str], *flags: str | int) -> Outcome:
        lines = "".join(question + "\n" for question in questions)
        return cli("generate", "--checkpoint", model, "--dtype", "float32", "--interactive", *flags, stdin=lines)

    return run


@pytest.fixture
def replies(monkeypatch: pytest.MonkeyPatch) -> list[Stream]:
    """Every stream that a conversation starts."""
    started: list[Stream] = []

    class Recorded(Stream):
        def __init__(self, *arguments: object, **settings: object) -> None:
            super().__init__(*arguments, **settings)  # type: ignore[arg-type]
            started.append(self)

    monkeypatch.setattr("gptfast.cli.interactive.Stream", Recorded)
    return started


def read_counts(stderr: str) -> list[tuple[int, int, int]]:
    """Tokens read, kept and new of every turn."""
    found = re.findall(r"\[(\d+) tokens read, (\d+) kept; (\d+) new,", stderr)
    return [(int(read), int(kept), int(new)) for read, kept, new in found]


def read_last_question(session: Session, reply: Stream) -> str:
    assert session.tokenizer is not None
    text = session.tokenizer.decode(reply.prompt_ids)
    return text.rpartition("user\n")[2].removesuffix("\nassistant\n")


def converse(session: Session, questions: list[str], max_new_tokens: int, system: str | None = None) -> list[str]:
    """The replies, every one computed anew from the whole history."""
    turns = [] if system is None else [Message("system", system)]
    texts = []
    for question in questions:
        turns.append(Message("user", question))
        texts.append(generate(session, turns, max_new_tokens=max_new_tokens)[0].text)
        turns.append(Message("assistant", texts[-1]))
    return texts


@pytest.mark.parametrize("system", [None, "You are a helpful assistant"])
def test_three_turns_are_those_of_the_whole_history(
    system: str | None, talk: Callable[..., Outcome], session: Session
) -> None:
    flags = [] if system is None else ["--system", system]
    outcome = talk(QUESTIONS, "--max-new-tokens", 10, *flags)
    assert outcome.exit_code == 0
    assert outcome.stdout == "".join(text + "\n" for text in converse(session, QUESTIONS, 10, system))


def test_turns_read_only_what_is_new(talk: Callable[..., Outcome], replies: list[Stream], session: Session) -> None:
    counts = read_counts(talk(QUESTIONS, "--max-new-tokens", 10).stderr)
    assert [new for _, _, new in counts] == [10, 10, 10]
    assert counts[0][1] == 0
    for turn in (1, 2):
        read, kept, _ = counts[turn]
        assert read + kept == len(replies[turn].prompt_ids)
        assert kept >= len(replies[turn - 1].prompt_ids)
        assert read < len(replies[turn].prompt_ids)


def test_the_figures_and_the_prompt_go_to_standard_error(talk: Callable[..., Outcome], session: Session) -> None:
    outcome = talk(["Hello"], "--max-new-tokens", 5)
    assert outcome.stdout == converse(session, ["Hello"], 5)[0] + "\n"
    assert "> " in outcome.stderr
    assert "Ctrl-D" in outcome.stderr


def test_empty_input_ends_at_once(talk: Callable[..., Outcome]) -> None:
    outcome = talk([])
    assert outcome.exit_code == 0
    assert outcome.stdout == ""
    assert "GB peak" in outcome.stderr


def test_an_empty_line_is_no_question(talk: Callable[..., Outcome], session: Session) -> None:
    outcome = talk(["", "Hello", ""], "--max-new-tokens", 5)
    assert outcome.exit_code == 0
    assert outcome.stdout == converse(session, ["Hello"], 5)[0] + "\n"


def test_a_history_longer_than_the_context_forgets_its_oldest_turn(
    talk: Callable[..., Outcome], replies: list[Stream]
) -> None:
    questions = [f"{word} Once upon a time there was a little girl" for word in ("one", "two", "three", "four", "five")]
    outcome = talk(questions)
    assert outcome.exit_code == 0, outcome.stderr
    assert len(replies) == 5
    assert "oldest turns are forgotten" in outcome.stderr
    for reply in replies:
        assert reply.result.new_tokens > 0
        assert len(reply.prompt_ids) + reply.result.new_tokens <= CONTEXT


@pytest.mark.parametrize(
    ("length", "flags"), [(2 * CONTEXT, ("--max-new-tokens", 5)), (150, ("--max-new-tokens", 200))]
)
def test_a_question_that_leaves_no_room_does_not_end_the_conversation(
    length: int,
    flags: tuple[str | int, ...],
    talk: Callable[..., Outcome],
    replies: list[Stream],
    session: Session,
) -> None:
    outcome = talk(["Hello", "x" * length, "Hello again"], *flags)
    assert outcome.exit_code == 0, outcome.stderr
    assert read_last_question(session, replies[-1]) == "Hello again"
    assert replies[-1].result.new_tokens > 0


def test_ctrl_c_ends_a_reply_and_not_the_conversation(
    talk: Callable[..., Outcome], replies: list[Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = Runner.decode
    calls = 0

    def interrupted(runner: Runner, tokens: torch.Tensor, position: int) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return decode(runner, tokens, position)

    monkeypatch.setattr(Runner, "decode", interrupted)
    outcome = talk(["Hello", "Hello again"], "--max-new-tokens", 10)
    assert outcome.exit_code == 0
    assert [reply.result.finish_reason for reply in replies] == ["interrupted", "length"]
    assert [reply.result.new_tokens for reply in replies] == [4, 10]
    assert outcome.stdout == "".join(reply.result.text + "\n" for reply in replies)


def test_ctrl_c_at_the_prompt_ends_the_conversation(
    talk: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("click.termui.visible_prompt_func", interrupt)
    outcome = talk([])
    assert outcome.exit_code == 130
    assert outcome.stdout == ""


def test_forgetting_keeps_the_system_message_and_drops_whole_turns(session: Session) -> None:
    system = [Message("system", "Be brief")]
    turns = [Message("user" if i % 2 == 0 else "assistant", f"{i} was in the park with her dog") for i in range(21)]
    kept, left = forget_oldest(session, system, turns, ROOM_FOR_REPLY)
    assert kept == turns[-len(kept) :]
    assert len(kept) % 2 == 1
    assert len(encode_prompt(session, [*system, *kept])) + left == CONTEXT
    assert left >= ROOM_FOR_REPLY
    assert len(encode_prompt(session, [*system, *turns[-len(kept) - 2 :]])) + ROOM_FOR_REPLY > CONTEXT
    assert forget_oldest(session, system, turns[-1:], ROOM_FOR_REPLY)[0] == turns[-1:]


def test_a_single_turn_that_does_not_fit_is_refused_with_the_number(session: Session) -> None:
    with pytest.raises(PromptError, match=str(CONTEXT)):
        forget_oldest(session, [], [Message("user", "x" * 2 * CONTEXT)], ROOM_FOR_REPLY)
