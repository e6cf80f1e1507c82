"""The default text, and the windows that a text is read in."""

from __future__ import annotations

from pydoc_data.topics import topics

import hypothesis.strategies as st
import pytest
from hypothesis import given

from gptfast.errors import UserError
from gptfast.evaluation.text import PERPLEXITY_TOPICS, Text, Window, plan_windows, read_default_text


def list_paragraphs(text: str) -> set[str]:
    """The paragraphs long enough not to stand in two places by chance, whatever their indentation."""
    paragraphs = (" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
    return {paragraph for paragraph in paragraphs if len(paragraph) >= 40}


def test_the_default_text_is_long_enough_for_the_default_number_of_tokens() -> None:
    text = read_default_text()
    assert len(text.content) > 5 * 16_384
    assert text == read_default_text()


def test_no_paragraph_of_the_default_text_stands_in_another_topic() -> None:
    """So what is calibrated on the other topics has not seen this text."""
    own = list_paragraphs(read_default_text().content)
    others = set().union(*(list_paragraphs(topics[name]) for name in topics if name not in PERPLEXITY_TOPICS))
    assert len(own) > 500
    assert len(others) > 500
    assert own.isdisjoint(others)


def test_the_hash_is_that_of_the_utf8_bytes() -> None:
    assert Text("a", "é").sha256 == "4a99557e4033c353"  # printf 'é' | sha256sum


def test_windows_overlap_and_score_what_is_new() -> None:
    assert plan_windows(10, 4, 2) == [Window(0, 1, 4), Window(2, 4, 6), Window(4, 6, 8), Window(6, 8, 10)]
    assert plan_windows(9, 4, 2)[-1] == Window(6, 8, 9)


def test_windows_that_do_not_overlap_lose_their_first_tokens() -> None:
    assert plan_windows(8, 4, 4) == [Window(0, 1, 4), Window(4, 5, 8)]


def test_a_last_window_of_one_token_is_left_out() -> None:
    assert plan_windows(9, 4, 4) == plan_windows(8, 4, 4)


def test_a_short_text_is_one_window() -> None:
    assert plan_windows(3, 1024, 512) == [Window(0, 1, 3)]


@given(st.integers(2, 300), st.integers(2, 40), st.data())
def test_overlapping_windows_score_every_token_but_the_first_once(
    n_tokens: int, size: int, data: st.DataObject
) -> None:
    stride = data.draw(st.integers(1, size - 1))
    windows = plan_windows(n_tokens, size, stride)
    assert [t for w in windows for t in range(w.first, w.stop)] == list(range(1, n_tokens))
    assert all(w.start < w.first < w.stop <= w.start + size for w in windows)
    assert [w.start for w in windows] == [i * stride for i in range(len(windows))]


@pytest.mark.parametrize(
    ("n_tokens", "size", "stride", "word"),
    [
        (100, 1, 1, "window is 1"),
        (100, 8, 0, "stride is 0"),
        (100, 8, 9, "stride is 9"),
        (1, 8, 4, "1 tokens"),
        (0, 8, 4, "0 tokens"),
    ],
)
def test_what_cannot_be_is_refused(n_tokens: int, size: int, stride: int, word: str) -> None:
    with pytest.raises(UserError, match=word):
        plan_windows(n_tokens, size, stride)
