"""Prompt lookup: what it proposes, against a search through the whole text, and what it costs."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, overload

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from gptfast.speculation.ngram import NgramProposer

MOST_LINES = 20 * 16
"""Of Python that a token may take where matches are told apart up to 16 tokens."""

PROMPTS = Path(__file__).parents[1] / "data" / "speculation_prompts.json"

texts = st.integers(1, 4).flatmap(lambda size: st.lists(st.integers(0, size), max_size=50))
lengths = st.integers(1, 3).flatmap(lambda least: st.tuples(st.just(least), st.integers(least, least + 5)))


def copy_from(text: Sequence[int], start: int, k: int) -> list[int]:
    """`k` tokens that are copied one after the other from `start` on to the end of the text."""
    copied = list(text)
    for i in range(k):
        copied.append(copied[start + i])
    return copied[len(text) :]


def search(text: Sequence[int], k: int, min_length: int, max_length: int) -> list[int]:
    """What follows the longest end of the text that occurs earlier, the latest time that it does."""
    text = list(text)
    for length in range(min(max_length, len(text) - 1), min_length - 1, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == text[-length:]:
                return copy_from(text, end, k)
    return []


@given(texts, st.integers(0, 9), lengths)
@example([0, 1, 2, 0, 1, 3, 0, 1], 3, (2, 4))  # the later of two that are equally long
@example([5, 0, 1, 2, 6, 0, 1, 3, 5, 0, 1], 3, (2, 4))  # the longer of two, though the other is later
@example([0, 0, 0, 0], 5, (1, 2))
def test_proposals_are_those_of_a_search_through_the_whole_text(
    text: list[int], k: int, limits: tuple[int, int]
) -> None:
    proposer = NgramProposer(min_length=limits[0], max_length=limits[1])
    assert proposer.propose(text, k) == search(text, k, *limits)


@given(texts, st.lists(st.integers(0, 50), max_size=10), st.integers(0, 9))
def test_a_text_that_grows_in_pieces_is_as_one_that_came_at_once(text: list[int], cuts: list[int], k: int) -> None:
    proposer = NgramProposer()
    for cut in sorted(cuts):
        assert proposer.propose(text[:cut], k) == NgramProposer().propose(text[:cut], k)
    assert proposer.propose(text, k) == NgramProposer().propose(text, k)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=50), st.integers(0, 9))
def test_another_text_of_the_same_length_is_noticed(pairs: list[tuple[int, int]], k: int) -> None:
    proposer = NgramProposer()
    for text in ([a for a, _ in pairs], [b for _, b in pairs]):
        assert proposer.propose(text, k) == search(text, k, 2, 16)


@given(texts, texts, st.integers(0, 9))
def test_a_text_that_is_shorter_or_longer_than_a_step_makes_it_is_compared_from_the_start(
    first: list[int], second: list[int], k: int
) -> None:
    proposer = NgramProposer()
    proposer.propose(first, k)
    if not 0 < len(second) - len(first) <= k + 1:
        assert proposer.propose(second, k) == search(second, k, 2, 16)


@pytest.mark.parametrize(("first_end", "second_end"), [([8, 9], [8, 9]), ([], [5, 6, 7, 8, 9])])
def test_a_difference_far_from_the_end_is_noticed_if_not_just_a_step_was_added(
    first_end: list[int], second_end: list[int]
) -> None:
    middle = [*range(10, 40)]
    proposer = NgramProposer()
    proposer.propose([8, 9, 3, *middle, *first_end], 3)
    assert proposer.propose([8, 9, 4, *middle, *second_end], 3) == [4, 10, 11]


def test_another_text_that_is_a_step_longer_is_told_by_its_end() -> None:
    proposer = NgramProposer()
    proposer.propose([1, 2, 3, 4, 5, 1, 2], 4)
    assert proposer.propose([6, 7, 8, 9, 6, 7, 8, 3], 4) == []
    assert proposer.propose([6, 7, 8, 9, 6, 7, 8, 3, 6, 7, 8], 4) == [3, 6, 7, 8]


@given(texts, st.integers(0, 50), texts)
def test_a_text_that_is_rolled_back_may_go_on_in_another_way(text: list[int], kept: int, rest: list[int]) -> None:
    proposer = NgramProposer()
    proposer.propose(text, 4)
    for shown in (text[:kept], text[:kept] + rest):
        assert proposer.propose(shown, 4) == search(shown, 4, 2, 16)


def test_a_period_is_continued_beyond_the_end_of_the_text() -> None:
    assert NgramProposer().propose([1, 2, 3, 1, 2, 3, 1, 2], 8) == [3, 1, 2, 3, 1, 2, 3, 1]
    assert NgramProposer().propose([7, 7, 7], 4) == [7, 7, 7, 7]


@pytest.mark.parametrize("text", [[], [5], [5, 5], [5, 6], [5, 6, 7, 6]])
def test_a_match_that_is_too_short_proposes_nothing(text: list[int]) -> None:
    assert NgramProposer(min_length=2).propose(text, 4) == []


def test_the_tokens_may_come_in_a_tuple_and_are_not_kept_by_reference() -> None:
    proposer = NgramProposer()
    text = [1, 2, 3, 1, 2]
    assert proposer.propose(tuple(text), 2) == [3, 1]
    assert proposer.propose(text, 2) == [3, 1]
    text[2] = 4
    assert proposer.propose(text, 2) == [4, 1]


class CountedTokens(Sequence[int]):
    """A text that counts how many of its tokens were read."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)
        self.reads = 0

    def __len__(self) -> int:
        return len(self.tokens)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        chosen = self.tokens[index]
        self.reads += len(chosen) if isinstance(chosen, list) else 1
        return chosen


def count_lines(proposer: NgramProposer, tokens: Sequence[int]) -> int:
    """Lines of Python that a proposal executes."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        proposer.propose(tokens, 4)
    finally:
        sys.settrace(before)
    return count


def make_text(kind: str, length: int) -> list[int]:
    generator = random.Random(0)
    fresh = [generator.randrange(50_000) for _ in range(length)]
    few = [generator.randrange(3) for _ in range(length)]
    return {"fresh": fresh, "few": few, "copied": fresh[: length // 2] * 2, "run": [7] * length}[kind]


@pytest.mark.parametrize("kind", ["fresh", "few", "copied", "run"])
def test_a_token_costs_the_same_however_long_the_text_is(kind: str) -> None:
    lines_per_token = []
    for length in (2_000, 8_000):
        text = make_text(kind, length)
        proposer = NgramProposer()
        lines_per_token.append(count_lines(proposer, text) / length)

        step = CountedTokens([*text, 1, 2, 3, 4, 5])
        assert count_lines(proposer, step) <= 5 * MOST_LINES
        assert step.reads <= 5 + 16
    assert max(lines_per_token) <= MOST_LINES
    assert lines_per_token[1] <= 1.5 * lines_per_token[0]  # matches by chance are a little longer in a longer text


def test_there_are_prompts_of_three_kinds_and_no_two_are_alike() -> None:
    prompts = json.loads(PROMPTS.read_text(encoding="utf-8"))
    assert {kind: len(of_kind) for kind, of_kind in prompts.items()} == {
        "mixed": 20,
        "free_writing": 20,
        "copy_edit": 10,
    }
    everything = [prompt for of_kind in prompts.values() for prompt in of_kind]
    assert len({" ".join(prompt.lower().split()) for prompt in everything}) == 50


def test_prompts_are_short_unless_there_is_a_passage_to_be_copied() -> None:
    prompts = json.loads(PROMPTS.read_text(encoding="utf-8"))
    for prompt in prompts["mixed"] + prompts["free_writing"]:
        assert 4 <= len(prompt.split()) <= 40
    for prompt in prompts["copy_edit"]:
        instruction, passage = prompt.split("\n\n", 1)
        assert len(instruction.split()) <= 20
        assert 80 <= len(passage.split()) <= 250
