"""What a session keeps between calls, and that it never changes a token."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import pytest
from torch import Tensor

from gptfast.errors import PromptError, UserError
from gptfast.generation import Stream, count_common, generate, stream
from gptfast.session import Session
from tests.reference.sessions import (
    CONTEXT,
    PROMPT,
    complete,
    ids_of,
    load_tiny,
    random_prompt,
)

pytestmark = pytest.mark.usefixtures("tiny_cache")


def test_reuse_computes_only_what_is_new_and_changes_no_token(session: Session) -> None:
    first = complete(session, random_prompt(50), 20)
    longer = [*random_prompt(50), *first.token_ids, *random_prompt(30, seed=1)]
    reply = stream(session, longer, max_new_tokens=20, reuse_cache=True)
    list(reply)
    # The last token was chosen but never read.
    assert reply.result.reused_tokens == 50 + 19
    assert reply.result.token_ids == ids_of(session, longer, 20)


def test_reuse_reads_no_more_than_it_says(eager: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = random_prompt(100)
    generate(eager, prompt, max_new_tokens=0)
    read: list[tuple[int, int]] = []
    prefill = eager.runner.prefill

    def record(ids: Sequence[int], start: int = 0) -> Tensor:
        read.append((len(ids), start))
        return prefill(ids, start)

    monkeypatch.setattr(eager.runner, "prefill", record)
    list(stream(eager, [*prompt, 5, 6], max_new_tokens=1, reuse_cache=True))
    assert read == [(2, 100)]


@pytest.mark.parametrize("shared", [0, 1, 30, 49, 50])
def test_reuse_stops_where_the_texts_part(shared: int, session: Session) -> None:
    generate(session, random_prompt(50), max_new_tokens=10)
    other = [*random_prompt(50)[:shared], *random_prompt(30, seed=9)]
    reply = stream(session, other, max_new_tokens=10, reuse_cache=True)
    list(reply)
    assert reply.result.reused_tokens == shared
    assert reply.result.token_ids == ids_of(session, other, 10)


def test_the_last_token_of_a_prompt_is_always_read(eager: Session) -> None:
    expected = ids_of(eager, random_prompt(50), 10)
    reply = stream(eager, random_prompt(50), max_new_tokens=10, reuse_cache=True)
    list(reply)
    assert reply.result.reused_tokens == 49
    assert reply.result.token_ids == expected


def test_reuse_after_a_stream_left_early(session: Session) -> None:
    expected = ids_of(session, random_prompt(50), 30)
    reply = stream(session, random_prompt(50), max_new_tokens=30)
    next(iter(reply))
    n_new = reply.result.new_tokens
    longer = [*random_prompt(50), *expected[:n_new]]
    again = stream(session, longer, max_new_tokens=30 - n_new, reuse_cache=True)
    list(again)
    assert again.result.reused_tokens == 50 + n_new - 1
    assert again.result.token_ids == expected[n_new:]


def test_reuse_holds_when_the_stream_is_read_after_another(eager: Session) -> None:
    """What is in the cache counts when reading starts, not when the stream is made."""
    prompt = random_prompt(50)
    expected = ids_of(eager, prompt, 10)
    reply = stream(eager, prompt, max_new_tokens=10, reuse_cache=True)
    complete(eager, random_prompt(60, seed=5), 10)
    list(reply)
    assert reply.result.token_ids == expected


def test_reuse_survives_a_refused_prompt(eager: Session) -> None:
    generate(eager, random_prompt(50), max_new_tokens=5)
    with pytest.raises(PromptError):
        generate(eager, random_prompt(CONTEXT + 1))
    reply = stream(eager, random_prompt(50), max_new_tokens=5, reuse_cache=True)
    list(reply)
    assert reply.result.reused_tokens == 49


def test_without_reuse_nothing_is_reused(eager: Session) -> None:
    generate(eager, random_prompt(50), max_new_tokens=5)
    assert complete(eager, random_prompt(50), 5).reused_tokens == 0


def test_count_common() -> None:
    assert count_common([], [1]) == 0
    assert count_common([1, 2, 3], [1, 2, 4, 5]) == 2
    assert count_common([1, 2], [1, 2, 3]) == 2


def test_two_streams_of_one_session_do_not_mix(eager: Session) -> None:
    """They share a cache; the one that lost it may end with an error, but not with other tokens."""
    expected = complete(eager, PROMPT, 30)
    first = stream(eager, PROMPT, max_new_tokens=30)
    next(iter(first))
    complete(eager, random_prompt(60), 10)
    with contextlib.suppress(UserError):
        list(first)
    assert first.result.token_ids == expected.token_ids[: first.result.new_tokens]


def test_several_rows_cannot_reuse_the_cache_of_the_first(directory: Path) -> None:
    session = load_tiny(directory, batch_size=2)
    with pytest.raises(UserError, match="batch size 1"):
        Stream(session, PROMPT, max_new_tokens=5, sample_ids=(0, 1), reuse_cache=True)
    both = Stream(session, PROMPT, max_new_tokens=5, sample_ids=(0, 1))
    list(both)
    assert [result.reused_tokens for result in both.results()] == [0, 0]


# Stop strings


def test_one_string_is_one_stop_string_and_not_its_characters(eager: Session) -> None:
    text = complete(eager, PROMPT, 40).text
    stop = text[10:14]
    assert len(set(stop)) > 1
    assert complete(eager, PROMPT, 40, stop=stop).text == text.split(stop)[0]
    assert complete(eager, PROMPT, 40, stop=stop).finish_reason == "stop"
    assert complete(eager, PROMPT, 40, stop=text[11] + "\0").text == text


@pytest.mark.parametrize("stop", ["", [""], ["x", ""]])
def test_an_empty_stop_string_is_refused(stop: str | list[str], eager: Session) -> None:
    for start in (generate, stream):
        with pytest.raises(UserError, match="empty stop string"):
            start(eager, PROMPT, max_new_tokens=5, stop=stop)
