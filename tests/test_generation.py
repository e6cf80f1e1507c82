"""The loop: what is streamed, why it ends, what it keeps between calls, and that samples are independent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from gptfast import generation
from gptfast.chat import Message
from gptfast.config import SamplingConfig
from gptfast.errors import PromptError, UserError
from gptfast.generation import (
    DEFAULT_MAX_NEW_TOKENS,
    Stream,
    generate,
    make_synthetic_prompt,
    stream,
)
from gptfast.session import Session
from gptfast.tokenizer import StreamDecoder
from tests.reference.product import load as load_model
from tests.reference.product import run
from tests.reference.sessions import (
    CONTEXT,
    PROMPT,
    complete,
    ids_of,
    load_tiny,
    random_prompt,
    tiny_config,
    write_tiny_model,
)

pytestmark = pytest.mark.usefixtures("tiny_cache")

SAMPLED = SamplingConfig(temperature=1.0, seed=7)
IM_END = 2


@pytest.fixture
def load_ending(tmp_path: Path) -> Callable[[Sequence[int]], Session]:
    """Loads the same model with these end-of-sequence tokens."""
    return lambda eos_ids: load_tiny(write_tiny_model(tmp_path / "ending", eos_ids=eos_ids))


def split_text(session: Session, ids: Sequence[int]) -> str:
    """The text of all the ids, decoded apart from the loop."""
    assert session.tokenizer is not None
    return session.tokenizer.decode(ids)


# Text and tokens


def test_greedy_tokens_are_the_argmax_of_uncached_passes(session: Session, directory: Path) -> None:
    model = load_model(directory, 60)
    ids = random_prompt(37)
    for _ in range(20):
        ids.append(int(run(model, ids)[-1].argmax()))
    assert ids_of(session, ids[:37], 20) == tuple(ids[37:])


@pytest.mark.parametrize("sampling", [SamplingConfig(), SAMPLED], ids=["greedy", "sampled"])
def test_pieces_add_up_to_the_text_of_all_the_tokens(sampling: SamplingConfig, session: Session) -> None:
    reply = stream(session, PROMPT, max_new_tokens=100, sampling=sampling)
    pieces = list(reply)
    assert all(pieces)
    assert "".join(pieces) == reply.result.text == split_text(session, reply.result.token_ids)
    assert reply.result.token_ids == ids_of(session, PROMPT, 100, sampling=sampling)


def test_no_piece_ends_within_a_character(eager: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    assert eager.tokenizer is not None
    ids = eager.tokenizer.encode("naïve 世界 🎉")
    decoder = StreamDecoder(eager.tokenizer)
    expected = [piece for token_id in ids if (piece := decoder.feed(token_id))]
    assert len(expected) < len(ids)

    chosen = iter(ids)
    monkeypatch.setattr(generation.Sampler, "choose", lambda *_: torch.tensor([next(chosen)]))
    pieces = list(stream(eager, [5], max_new_tokens=len(ids)))
    assert pieces == expected
    assert "\ufffd" not in "".join(pieces)


def test_the_names_of_the_package_are_these_functions() -> None:
    import gptfast
    from gptfast.session import load

    assert gptfast.generate is generate
    assert gptfast.stream is stream
    assert gptfast.Stream is Stream
    assert gptfast.load is load
    assert set(gptfast.__all__) <= set(dir(gptfast)) | set(gptfast._HOMES)
    with pytest.raises(AttributeError, match="'generat'"):
        _ = gptfast.generat


# How a text ends


def test_length_ends_a_text_at_the_number_asked_for(session: Session) -> None:
    result = complete(session, PROMPT, 17)
    assert result.finish_reason == "length"
    assert result.new_tokens == len(result.token_ids) == 17


def test_every_end_of_sequence_token_ends_a_text_and_is_not_in_it(
    eager: Session, load_ending: Callable[[Sequence[int]], Session]
) -> None:
    ids = ids_of(eager, PROMPT, 30)
    for where in (0, 7, 20):
        end = ids[where]
        session = load_ending([IM_END, end])
        reply = stream(session, PROMPT, max_new_tokens=30)
        text = "".join(reply)
        first = ids.index(end)
        assert reply.result.finish_reason == "eos"
        assert reply.result.token_ids == ids[: first + 1]
        assert text == reply.result.text == split_text(session, ids[:first])


def test_a_stop_string_across_tokens_ends_the_text_before_it(session: Session) -> None:
    full = complete(session, PROMPT, 60)
    start = len(full.text) // 2
    stop = full.text[start : start + 3]
    expected = full.text.split(stop)[0]
    reply = stream(session, PROMPT, max_new_tokens=60, stop=["never there", stop])
    assert "".join(reply) == reply.result.text == expected
    assert reply.result.finish_reason == "stop"
    assert reply.result.token_ids == full.token_ids[: reply.result.new_tokens]
    assert stop in split_text(session, reply.result.token_ids)
    assert stop not in split_text(session, reply.result.token_ids[:-1])


def test_the_end_of_sequence_at_the_last_token_is_called_so(
    eager: Session, load_ending: Callable[[Sequence[int]], Session]
) -> None:
    ids = ids_of(eager, PROMPT, 8)
    assert ids.index(ids[7]) == 7
    assert complete(load_ending([ids[7]]), PROMPT, 8).finish_reason == "eos"


def test_no_new_tokens_are_no_text(session: Session) -> None:
    reply = stream(session, PROMPT, max_new_tokens=0)
    assert list(reply) == []
    assert reply.result.token_ids == ()
    assert reply.result.finish_reason == "length"
    assert reply.result.prompt_tokens == len(reply.prompt_ids) > 0
    assert reply.result.prefill_tokens_per_s > 0
    assert reply.result.decode_tokens_per_s == 0


def test_a_stream_left_early_is_interrupted_and_leaves_the_session_usable(session: Session) -> None:
    expected = complete(session, PROMPT, 40)
    reply = stream(session, PROMPT, max_new_tokens=40)
    text = ""
    for piece in reply:
        text += piece
        if len(text) > 10:
            break
    assert reply.result.finish_reason == "interrupted"
    assert reply.result.text == text
    assert 0 < reply.result.new_tokens < 40
    assert reply.result.token_ids == expected.token_ids[: reply.result.new_tokens]
    assert ids_of(session, PROMPT, 40) == expected.token_ids
    assert ids_of(session, [5, 6, 7], 10) == ids_of(session, [5, 6, 7], 10)


def test_a_stream_that_was_left_goes_on_where_it_was(session: Session) -> None:
    expected = complete(session, PROMPT, 40)
    reply = stream(session, PROMPT, max_new_tokens=40)
    text = next(iter(reply))
    assert text + "".join(reply) == expected.text
    assert reply.result.token_ids == expected.token_ids
    assert reply.result.finish_reason == "length"


def test_what_was_not_started_has_no_tokens(eager: Session) -> None:
    result = stream(eager, PROMPT, max_new_tokens=4).result
    assert result.token_ids == ()
    assert result.finish_reason == "interrupted"
    assert result.decode_tokens_per_s == result.prefill_tokens_per_s == 0


# Limits


def test_without_a_number_a_text_has_256_tokens_or_what_the_context_leaves(tmp_path: Path, eager: Session) -> None:
    assert generate(eager, random_prompt(5))[0].new_tokens == DEFAULT_MAX_NEW_TOKENS == 256
    short = load_tiny(write_tiny_model(tmp_path / "short", context=96))
    assert generate(short, random_prompt(90))[0].new_tokens == 6


def test_the_context_can_be_filled_to_its_last_token(tmp_path: Path, eager: Session) -> None:
    short = load_tiny(write_tiny_model(tmp_path / "short", context=96))
    for prompt_tokens in (1, 64, 95):
        prompt = random_prompt(prompt_tokens)
        assert ids_of(short, prompt, 96 - prompt_tokens) == ids_of(eager, prompt, 96 - prompt_tokens)
    assert ids_of(short, random_prompt(96), 0) == ()


@pytest.mark.parametrize(("prompt_tokens", "asked"), [(95, 2), (96, 1), (96, None), (97, 0), (500, None), (1, 10**9)])
def test_more_than_the_context_is_refused_with_the_numbers(
    prompt_tokens: int, asked: int | None, tmp_path: Path
) -> None:
    short = load_tiny(write_tiny_model(tmp_path / "short", context=96))
    before = ids_of(short, random_prompt(20), 5)
    with pytest.raises(PromptError, match=rf"{prompt_tokens} tokens .* 96; shorten"):
        generate(short, random_prompt(prompt_tokens), max_new_tokens=asked)
    assert short.runner.capacity == 96
    assert ids_of(short, random_prompt(20), 5) == before


def test_a_negative_number_of_tokens_is_refused(eager: Session) -> None:
    with pytest.raises(UserError, match="-1; it must be 0 or more"):
        generate(eager, PROMPT, max_new_tokens=-1)


def test_a_prompt_that_the_cache_has_to_grow_for_continues_alike(compiled: Session, eager: Session) -> None:
    ids = random_prompt(2100)
    short = ids_of(compiled, PROMPT, 10)
    assert ids_of(compiled, ids, 10) == ids_of(eager, ids, 10)
    assert ids_of(compiled, PROMPT, 10) == short


@pytest.mark.parametrize("reserved", [20, 30, 40, 2048, CONTEXT - 24])
def test_tokens_do_not_depend_on_how_many_are_asked_for(reserved: int, directory: Path, eager: Session) -> None:
    expected = ids_of(eager, random_prompt(24), 20)
    reply = stream(load_tiny(directory), random_prompt(24), max_new_tokens=reserved)
    for _ in reply:
        if reply.result.new_tokens >= 20:
            break
    assert reply.result.token_ids[:20] == expected


@pytest.mark.parametrize("prompt_tokens", [1, 31, 32, 33, 127, 128, 129, 256, 257, 400])
def test_tokens_do_not_depend_on_the_chunks_of_the_prompt(prompt_tokens: int, session: Session, eager: Session) -> None:
    """Read at once in padded chunks, or all but one token from the cache of an earlier call."""
    ids = random_prompt(prompt_tokens, seed=prompt_tokens)
    expected = ids_of(session, ids, 8)
    generate(eager, ids, max_new_tokens=0)
    reply = stream(eager, ids, max_new_tokens=8, reuse_cache=True)
    list(reply)
    assert reply.result.reused_tokens == prompt_tokens - 1
    assert reply.result.token_ids == expected


def test_prompts_of_any_order_of_lengths_run_in_one_session(session: Session, directory: Path) -> None:
    for length in (5, 200, 7, 500):
        ids = random_prompt(length, seed=length)
        assert ids_of(session, ids, 6) == ids_of(load_tiny(directory), ids, 6)


# Prompts


@pytest.mark.parametrize("prompt", ["", []], ids=["text", "ids"])
def test_a_prompt_without_a_token_is_refused(prompt: generation.Prompt, eager: Session) -> None:
    with pytest.raises(PromptError, match="give it some text"):
        generate(eager, prompt)


def test_white_space_is_a_prompt(eager: Session) -> None:
    assert complete(eager, " \n", 3).new_tokens == 3


@pytest.mark.parametrize("token_id", [-1, tiny_config().vocab_size, 2**40])
def test_an_id_outside_the_vocabulary_is_refused_by_name(token_id: int, eager: Session) -> None:
    with pytest.raises(PromptError, match=f"token id {token_id} .* {tiny_config().vocab_size}"):
        generate(eager, [5, token_id])


@pytest.mark.parametrize("prompt", [[5, "six", 7], [5, 6.0], [5, Message("user", "six")], ["five", "six"]])
def test_nothing_of_a_prompt_is_left_out_silently(prompt: list[object], eager: Session) -> None:
    with pytest.raises((PromptError, TypeError)):
        generate(eager, prompt)  # type: ignore[arg-type]


def test_integers_of_any_kind_are_token_ids(eager: Session) -> None:
    ids = random_prompt(6)
    assert ids_of(eager, torch.tensor(ids).numpy(), 4) == ids_of(eager, ids, 4)  # type: ignore[arg-type]


def test_messages_go_through_the_template(eager: Session) -> None:
    reply = stream(eager, [Message("user", "Hello")], max_new_tokens=4)
    assert eager.tokenizer is not None
    control = eager.tokenizer.control_tokens
    assert reply.prompt_ids[0] == control["<|im_start|>"]
    assert reply.prompt_ids.count(control["<|im_end|>"]) == 1
    assert split_text(eager, reply.prompt_ids) == "user\nHello\nassistant\n"
    assert len(list(reply)) > 0


def test_messages_without_a_template_are_refused(tmp_path: Path) -> None:
    base = load_tiny(write_tiny_model(tmp_path / "base", template=None))
    with pytest.raises(PromptError, match="no chat template"):
        generate(base, [Message("user", "Hello")])


def test_a_synthetic_prompt_is_the_same_at_every_call_and_holds_no_control_token(eager: Session) -> None:
    ids = make_synthetic_prompt(eager, 1000)
    assert len(ids) == 1000
    assert make_synthetic_prompt(eager, 1000) == ids
    assert eager.tokenizer is not None
    assert set(eager.tokenizer.control_tokens.values()).isdisjoint(ids)
    with pytest.raises(PromptError, match="0 tokens"):
        make_synthetic_prompt(eager, 0)


# Time


class Clock:
    """Stands still but for what a test makes pass."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now


def test_times_are_those_of_the_steps_and_not_of_the_caller(eager: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(generation, "time", clock)
    prefill, decode = eager.runner.prefill, eager.runner.decode

    def slow_prefill(ids: Sequence[int], start: int = 0) -> torch.Tensor:
        clock.now += 2.0
        return prefill(ids, start)

    def slow_decode(tokens: torch.Tensor, position: int) -> torch.Tensor:
        clock.now += 0.25
        return decode(tokens, position)

    monkeypatch.setattr(eager.runner, "prefill", slow_prefill)
    monkeypatch.setattr(eager.runner, "decode", slow_decode)
    reply = stream(eager, random_prompt(10), max_new_tokens=9)
    clock.now += 1.0  # between the call and the first step the caller does what it likes
    for _ in reply:
        clock.now += 50.0
    result = reply.result
    assert result.ttft_s == 2.0
    assert result.prefill_s == 2.0
    assert result.decode_s == 2.0
    assert result.prefill_tokens_per_s == 5.0
    assert result.decode_tokens_per_s == 4.0
