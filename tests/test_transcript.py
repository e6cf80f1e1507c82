"""The text that is shown of a stream of tokens, whatever the boundaries of the tokens are."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from gptfast.errors import UserError
from gptfast.transcript import Transcript, count_overlap

EOS = 1_000_000
OTHER_EOS = 1_000_001


class ChunkTokenizer:
    """Token i stands for the i-th of the given byte strings."""

    bos_id = None
    adds_bos = False
    control_tokens: Mapping[str, int] = {}

    def __init__(self, chunks: Sequence[bytes]) -> None:
        self.chunks = chunks
        self.vocab_size = len(chunks)

    def token_bytes(self, token_id: int) -> bytes:
        return self.chunks[token_id] if token_id < len(self.chunks) else b""

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        raise NotImplementedError

    def encode_rendered(self, text: str, guard: str = "") -> list[int]:
        raise NotImplementedError

    def decode(self, ids: Iterable[int]) -> str:
        raise NotImplementedError


def push_all(chunks: Sequence[bytes], stop: Sequence[str] = (), *, eos: bool = False) -> tuple[Transcript, list[str]]:
    """The transcript of the chunks, and the pieces that were shown; it ends by EOS or by length."""
    transcript = Transcript(ChunkTokenizer(chunks), frozenset({EOS, OTHER_EOS}), stop)
    pieces = []
    for token_id in [*range(len(chunks)), *([EOS] if eos else [])]:
        transcript.push(token_id)
        pieces.append(transcript.take_text())
        if transcript.finish_reason is not None:
            break
    if transcript.finish_reason is None:
        transcript.finish("length")
        pieces.append(transcript.take_text())
    return transcript, pieces


def split_at(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    edges = [0, *sorted({cut % (len(data) + 1) for cut in cuts}), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(edges)]


cut_lists = st.lists(st.integers(0, 10_000), max_size=40)
letters = st.text(alphabet="ab", min_size=1, max_size=12)
short_stops = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3)


@given(st.text(max_size=40), cut_lists)
@example("🙂你é\n a", [1, 2, 3, 5, 6, 8])
def test_pieces_add_up_to_the_text_and_hold_no_half_character(text: str, cuts: list[int]) -> None:
    transcript, pieces = push_all(split_at(text.encode(), cuts))
    assert "".join(pieces) == transcript.text == text
    assert transcript.finish_reason == "length"


@given(st.binary(max_size=40), cut_lists)
def test_bytes_that_are_no_text_do_not_depend_on_the_split(data: bytes, cuts: list[int]) -> None:
    transcript, pieces = push_all(split_at(data, cuts))
    assert "".join(pieces) == transcript.text == data.decode("utf-8", errors="replace")


def test_an_invalid_byte_does_not_hold_the_text_back() -> None:
    _, pieces = push_all([b"a", b"\xff", b"b", b"c"])
    assert pieces[:3] == ["a", "\ufffd", "b"]


def test_a_character_that_never_ends_is_shown_as_a_replacement() -> None:
    transcript, pieces = push_all(["🙂".encode()[:3]])
    assert transcript.text == "\ufffd"
    assert pieces == ["", "\ufffd"]


@given(st.text(alphabet="ab🙂", max_size=30), st.text(alphabet="ab🙂", min_size=1, max_size=4), cut_lists)
@example("aab", "ab", [1, 2])
def test_a_stop_string_ends_the_text_where_it_first_occurs(text: str, stop: str, cuts: list[int]) -> None:
    transcript, pieces = push_all(split_at(text.encode(), cuts), [stop])
    assert "".join(pieces) == transcript.text == text.split(stop)[0]
    assert transcript.finish_reason == ("stop" if stop in text else "length")


@given(st.text(alphabet="abcd", max_size=30), st.permutations(["ab", "cc", "dad"]), cut_lists)
def test_the_first_of_several_stop_strings_counts(text: str, stop: list[str], cuts: list[int]) -> None:
    transcript, _ = push_all(split_at(text.encode(), cuts), stop)
    assert transcript.text == text[: min(text.find(s) % (len(text) + 1) for s in stop)]


@given(letters, short_stops, cut_lists)
@example("aba", ["aba", "b"], [1, 2])
def test_overlapping_stop_strings_do_not_depend_on_the_split(text: str, stop: list[str], cuts: list[int]) -> None:
    whole, _ = push_all([text.encode()], stop)
    parts, pieces = push_all(split_at(text.encode(), cuts), stop)
    assert parts.text == whole.text == "".join(pieces)
    assert parts.finish_reason == whole.finish_reason


def test_only_what_could_become_a_stop_string_is_held_back() -> None:
    _, pieces = push_all([b"x", b"<", b"y", b"<", b"/", b"z"], ["</s>"])
    assert pieces == ["x", "", "<y", "", "", "</z", ""]


@pytest.mark.parametrize("eos", [True, False])
def test_the_end_releases_what_was_held_back(eos: bool) -> None:
    transcript, pieces = push_all([b"x", b"<", b"/"], ["</s>"], eos=eos)
    assert "".join(pieces) == transcript.text == "x</"
    assert transcript.finish_reason == ("eos" if eos else "length")


@pytest.mark.parametrize("end", [EOS, OTHER_EOS])
def test_every_end_of_sequence_token_ends_and_stands_in_the_ids_alone(end: int) -> None:
    transcript = Transcript(ChunkTokenizer([b"a"]), frozenset({EOS, OTHER_EOS}), ())
    transcript.push(0)
    transcript.push(end)
    assert transcript.finish_reason == "eos"
    assert transcript.token_ids == [0, end]
    assert transcript.text == "a"


def test_a_stop_string_that_the_flush_completes_counts() -> None:
    transcript, _ = push_all([b"a", b"\xf0\x9f"], ["\ufffd"])
    assert transcript.text == "a"
    assert transcript.finish_reason == "stop"


def test_without_a_tokenizer_there_are_ids_and_no_text() -> None:
    transcript = Transcript(None, frozenset({EOS}), ())
    transcript.push(5)
    transcript.push(EOS)
    assert transcript.token_ids == [5, EOS]
    assert transcript.text == ""
    assert transcript.finish_reason == "eos"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(UserError, match="empty stop string"):
        Transcript(ChunkTokenizer([]), frozenset(), ["x", ""])


@given(st.text(alphabet="ab", max_size=8), st.text(alphabet="ab", min_size=1, max_size=8))
def test_count_overlap_equals_the_definition(text: str, stop: str) -> None:
    overlaps = [n for n in range(len(stop)) if text.endswith(stop[:n])]
    assert count_overlap(text, stop) == max(overlaps)
