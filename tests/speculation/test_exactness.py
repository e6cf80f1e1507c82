"""Speculation changes no token: texts with it and without, on the tiny model and on the default one."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from gptfast import graphs as graphs_module
from gptfast.cache import CACHE_VARIABLE
from gptfast.chat import Message
from gptfast.compilation import count_traced_graphs
from gptfast.config import SamplingConfig
from gptfast.download import peek_default_model
from gptfast.exactness import Divergence, find_divergence
from gptfast.generation import GenerationResult, Prompt, Stream, generate, stream
from gptfast.runner import ANY_SIZE
from gptfast.sampling import Sampler
from gptfast.session import Session, load
from gptfast.speculation.controller import SpeculationController
from gptfast.speculation.draft import DraftModel
from gptfast.speculation.speculator import Lane, Speculator
from tests.reference.clock import FakeClock
from tests.reference.sessions import (
    PROMPT,
    complete,
    ids_of,
    load_tiny,
    random_prompt,
    share_kernels,
    tiny_config,
    write_tiny_model,
)

ITSELF = "itself"
"""As a draft: the path of the target's checkpoint."""
DRAFTS = ("int4", "layers:1", "ngram", "ngram,layers:1", ITSELF)
DRAFT_CASES = [
    # Three more steps to compile, whose products tests/test_runner.py compares in any case.
    pytest.param(draft, is_compiled, marks=[pytest.mark.slow] if is_compiled and draft == "int4" else [])
    for draft in DRAFTS
    for is_compiled in (False, True)
]
KS = (*range(1, 9), None)
SAMPLINGS = {
    "greedy": SamplingConfig(),
    "sampled": SamplingConfig(temperature=0.8, seed=5),
    "filtered": SamplingConfig(temperature=0.8, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.2, seed=6),
}
PROMPTS = Path(__file__).parents[1] / "data" / "speculation_prompts.json"
MODEL = peek_default_model()
tiny = pytest.mark.usefixtures("tiny_cache")
default_model = pytest.mark.skipif(MODEL is None, reason="the default model is not on this machine")


def open_draft(directory: Path, draft: str, **settings: Any) -> Session:
    return load_tiny(directory, draft=str(directory) if draft == ITSELF else draft, **settings)


@pytest.fixture(scope="module", params=[False, True], ids=["eager", "compiled"])
def open_session(request: pytest.FixtureRequest, directory: Path) -> Callable[[str], Session]:
    """The tiny model with a draft, loaded once."""
    opened: dict[str, Session] = {}

    def open_once(draft: str) -> Session:
        if draft not in opened:
            opened[draft] = open_draft(directory, draft, compile=request.param)
        return opened[draft]

    return open_once


@pytest.fixture
def _steps_of_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafting and every step take as long, so that a free choice of k does not depend on the machine."""
    monkeypatch.setattr(graphs_module, "time", SimpleNamespace(perf_counter=FakeClock(1.0)))


def with_k(session: Session, k: int | None, draft: str | None = None) -> Session:
    """The same session with that many tokens in every round, or as many as pay; nothing of a draft is loaded again.

    Of several proposers, those that `draft` names take part.
    """
    assert session.speculator is not None
    lanes = [
        replace(lane, controller=SpeculationController(max_k=k or 8, fixed_k=k))
        for lane in session.speculator.lanes
        if draft is None or lane.name in draft.split(",")
    ]
    return replace(session, speculator=Speculator(session.runner, lanes), cached_ids=[])


def without_speculation(session: Session) -> Session:
    return replace(session, speculator=None, cached_ids=[])


def count_tokens(session: Session) -> tuple[int, int]:
    """Tokens that were proposed and accepted, by all lanes."""
    assert session.speculator is not None
    statistics = session.speculator.statistics.values()
    return sum(each.proposed for each in statistics), sum(each.accepted for each in statistics)


def describe(result: GenerationResult) -> tuple[str, tuple[int, ...], str]:
    return result.text, result.token_ids, result.finish_reason


# Any draft, any k


@tiny
@pytest.mark.usefixtures("_steps_of_a_second")
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(("draft", "open_session"), DRAFT_CASES, indirect=["open_session"])
def test_texts_are_those_of_plain_decoding(draft: str, sampling: str, open_session: Callable[[str], Session]) -> None:
    session = open_session(draft)
    prompt = [*random_prompt(12, seed=2), *random_prompt(8, seed=3), *random_prompt(12, seed=2)]
    settings = {"sampling": SAMPLINGS[sampling], "ignore_eos": True}
    expected = ids_of(without_speculation(session), prompt, 50, **settings)
    proposed = 0
    for k in KS:
        speculating = with_k(session, k)
        assert ids_of(speculating, prompt, 50, **settings) == expected, k
        proposed += count_tokens(speculating)[0]
    # A random model's samples do not repeat themselves, so there is nothing to look up.
    assert proposed > 20 or (draft == "ngram" and sampling != "greedy")


@tiny
@pytest.mark.parametrize("precision", [("bf16", None), ("int4", "int8"), ("int4", "fp32")])
@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "int8"])
def test_texts_in_every_precision_are_those_of_plain_decoding(
    precision: tuple[str, str | None], kv_dtype: str, directory: Path
) -> None:
    weights, activations = precision
    session = open_draft(directory, ITSELF, weights=weights, activations=activations, kv_dtype=kv_dtype)
    for sampling in SAMPLINGS.values():
        expected = ids_of(without_speculation(session), PROMPT, 60, sampling=sampling)
        for k in (2, 5, 8):
            assert ids_of(with_k(session, k), PROMPT, 60, sampling=sampling) == expected


@tiny
def test_every_sample_is_that_of_plain_decoding(directory: Path, eager: Session) -> None:
    session = open_draft(directory, "layers:1", speculate_k=3)
    settings: dict[str, Any] = {"num_samples": 3, "max_new_tokens": 30, "sampling": SAMPLINGS["sampled"]}
    samples = [result.token_ids for result in generate(session, PROMPT, **settings)]
    assert samples == [result.token_ids for result in generate(eager, PROMPT, **settings)]
    assert len(set(samples)) == 3


@tiny
def test_pieces_of_a_stream_add_up_to_the_text(directory: Path, eager: Session) -> None:
    session = open_draft(directory, ITSELF, speculate_k=5)
    reply = stream(session, PROMPT, max_new_tokens=50)
    steps = list(reply.iterate_steps())
    assert "".join(steps) == reply.result.text == complete(eager, PROMPT, 50).text
    assert len(steps) == reply.result.decode_steps + 1 == 10


# How a text ends


@tiny
@pytest.mark.parametrize("draft", ["ngram,layers:1", ITSELF])
@pytest.mark.parametrize("max_new_tokens", [0, 1, 2, 7, 9, 10, 11])
def test_a_shorter_text_is_the_beginning_of_a_longer(
    max_new_tokens: int, draft: str, open_session: Callable[[str], Session]
) -> None:
    session = with_k(open_session(draft), 8)
    expected = ids_of(without_speculation(session), PROMPT, 40)
    result = complete(session, PROMPT, max_new_tokens)
    assert result.token_ids == expected[:max_new_tokens]
    assert result.finish_reason == "length"


@tiny
@pytest.mark.parametrize("draft", ["layers:1", ITSELF])
@pytest.mark.parametrize("max_new_tokens", [None, 16])
def test_a_text_ends_with_the_context(max_new_tokens: int | None, draft: str, tmp_path: Path, tiny_cache: None) -> None:
    directory = write_tiny_model(tmp_path / "short", context=96)
    prompt = random_prompt(80)
    session = open_draft(directory, draft)
    expected = generate(without_speculation(session), prompt)[0]
    assert expected.new_tokens == 16
    for k in KS:
        result = generate(with_k(session, k), prompt, max_new_tokens=max_new_tokens)[0]
        assert describe(result) == describe(expected)


@tiny
@pytest.mark.parametrize("k", [1, 4, 8])
@pytest.mark.parametrize("draft", ["ngram,layers:1", ITSELF])
def test_a_stop_string_inside_a_round_ends_the_text_where_it_would_without(
    draft: str, k: int, open_session: Callable[[str], Session]
) -> None:
    session = with_k(open_session(draft), k)
    text = complete(without_speculation(session), PROMPT, 60).text
    for start in range(0, 24, 3):
        stop = text[start : start + 2]
        expected = complete(without_speculation(session), PROMPT, 60, stop=stop)
        assert expected.finish_reason == "stop"
        reply = stream(session, PROMPT, max_new_tokens=60, stop=stop)
        assert "".join(reply) == expected.text
        assert describe(reply.result) == describe(expected)


@tiny
@pytest.mark.parametrize("k", [1, 4, 8])
@pytest.mark.parametrize("draft", ["ngram,layers:1", ITSELF])
def test_an_end_of_sequence_inside_a_round_ends_the_text_where_it_would_without(
    draft: str, k: int, open_session: Callable[[str], Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = with_k(open_session(draft), k)
    ids = ids_of(without_speculation(session), PROMPT, 30)
    for end in ids[:12]:
        ending = replace(session.defaults, eos_ids=(end,))
        monkeypatch.setattr(session.checkpoint, "generation", ending)
        expected = complete(without_speculation(session), PROMPT, 30)
        assert (expected.finish_reason, expected.token_ids[-1]) == ("eos", end)
        assert describe(complete(session, PROMPT, 30)) == describe(expected)


@tiny
@pytest.mark.parametrize("end", ["stop", "length", "left early"])
@pytest.mark.parametrize("draft", ["ngram,layers:1", ITSELF])
def test_a_turn_that_goes_on_from_the_cache_is_as_one_without_it(
    draft: str, end: str, open_session: Callable[[str], Session]
) -> None:
    session = with_k(open_session(draft), 6)
    plain = without_speculation(session)
    text = complete(plain, PROMPT, 40).text
    stop = text[10:13] if end == "stop" else ()
    for turn in range(3):
        reply = stream(session, PROMPT, max_new_tokens=25, stop=stop)
        if end == "left early":
            next(iter(reply))
        else:
            assert "".join(reply)
        prompt = [*reply.prompt_ids, *reply.result.token_ids, *random_prompt(9, seed=turn)]
        following = stream(session, prompt, max_new_tokens=30, reuse_cache=True)
        list(following)
        # The last token was chosen, and may not have been read.
        assert following.result.reused_tokens >= len(reply.prompt_ids) + reply.result.new_tokens - 1
        assert following.result.token_ids == ids_of(plain, prompt, 30)


@tiny
def test_the_conversation_of_a_chat_is_that_of_plain_decoding(directory: Path, eager: Session) -> None:
    session = open_draft(directory, "ngram,layers:1", speculate_k=4)
    conversation: list[Message] = []
    for question in ("Hello!", "How are you?", "And the dog?"):
        conversation.append(Message("user", question))
        replies = [stream(each, conversation, max_new_tokens=40, reuse_cache=True) for each in (session, eager)]
        texts = ["".join(reply) for reply in replies]
        assert texts[0] == texts[1]
        assert replies[0].result.token_ids == replies[1].result.token_ids
        conversation.append(Message("assistant", texts[0]))


# Compiled steps


@tiny
@pytest.mark.parametrize("draft", ["layers:1", ITSELF])
def test_nothing_is_compiled_after_the_warm_up_whatever_k_is(draft: str, directory: Path) -> None:
    session = open_draft(directory, draft, compile=True)
    assert session.speculator is not None
    session.warm_up(100)
    runners = [session.runner, *session.speculator.list_runners()]
    before = count_traced_graphs(), [vars(runner.compile_statistics).copy() for runner in runners]
    generator = random.Random(0)
    for number in range(20):
        prompt = random_prompt(generator.randint(1, 120), seed=number)
        complete(with_k(session, KS[number % len(KS)]), prompt, 20)
    assert (count_traced_graphs(), [vars(runner.compile_statistics) for runner in runners]) == before
    for runner in runners:
        sizes = [size for step, size in runner._steps if getattr(step, "__name__", "") == "verify"]
        assert sizes == [ANY_SIZE]


class RestingController(SpeculationController):
    """Asks for 3 tokens in every round, but rests for 40 steps from the fourth on."""

    def __init__(self) -> None:
        super().__init__(max_k=3, fixed_k=3)
        self._steps = 0

    def choose_k(self) -> int:
        self._steps += 1
        return 0 if 4 <= self._steps < 44 else 3


@tiny
@pytest.mark.parametrize("length", [20, 129, 200, 256, 300])
def test_no_step_is_compiled_in_the_middle_of_a_text_though_a_draft_rests_and_returns(
    length: int, directory: Path
) -> None:
    """What it missed may take a smaller prefill step than the prompt, or more of them."""
    session = open_draft(directory, ITSELF, compile=True)
    runners = session.list_runners()
    proposer = DraftModel(runners[1], tiny_config().vocab_size)
    lane = Lane("draft", proposer, RestingController())
    session = replace(session, speculator=Speculator(session.runner, [lane]))
    reply = stream(session, random_prompt(length), max_new_tokens=80)
    before = count_traced_graphs(), [vars(runner.compile_statistics).copy() for runner in runners]
    assert before[1][1]["seconds"] > 0
    list(reply)
    statistics = lane.controller.statistics
    assert statistics.plain_steps >= 40
    assert statistics.rounds > 3
    assert statistics.accepted == statistics.proposed
    # It may also have missed more than the prompt's length.
    proposer.propose(random_prompt(length + 300, seed=1), 2, Sampler(SamplingConfig(), [0], tiny_config().vocab_size))
    assert (count_traced_graphs(), [vars(runner.compile_statistics) for runner in runners]) == before


# Where two texts differ


def finish(session: Session, prompt: Prompt, max_new_tokens: int, **settings: Any) -> Stream:
    """A stream at its end."""
    ended = Stream(session, prompt, max_new_tokens=max_new_tokens, **settings)
    list(ended)
    return ended


@tiny
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_equal_texts_have_no_divergence(sampling: str, open_session: Callable[[str], Session]) -> None:
    session = with_k(open_session("layers:1"), 3)
    speculated = finish(session, PROMPT, 30, sampling=SAMPLINGS[sampling])
    plain = Stream(session, PROMPT, max_new_tokens=30, sampling=SAMPLINGS[sampling], speculates=False)
    assert find_divergence(session, speculated, plain) is None
    assert plain.result.token_ids == speculated.result.token_ids
    # The other one did not speculate.
    assert plain.result.decode_steps == 29 > speculated.result.decode_steps


def spoil_round(session: Session, number: int, patch: pytest.MonkeyPatch) -> list[int]:
    """Have the target choose other tokens from the round of that number on, from 0; where each such round begins."""
    verify = session.runner.verify
    rounds = 0
    spoiled_positions: list[int] = []

    def spoiled(tokens: Tensor, position: int) -> Tensor:
        nonlocal rounds
        logits = verify(tokens, position)
        rounds += 1
        if rounds <= number:
            return logits
        spoiled_positions.append(position + 1)
        return 100 * logits.roll(1, dims=-1)

    patch.setattr(session.runner, "verify", spoiled)
    return spoiled_positions


def record_margins(session: Session, patch: pytest.MonkeyPatch) -> list[float]:
    """How far the two largest logits of every plain step from now on are apart."""
    decode = session.runner.decode
    margins: list[float] = []

    def recorded(tokens: Tensor, position: int) -> Tensor:
        logits = decode(tokens, position)
        first, second = logits[0].sort(descending=True).values[:2].tolist()
        margins.append(first - second)
        return logits

    patch.setattr(session.runner, "decode", recorded)
    return margins


@tiny
@pytest.mark.parametrize("settings", [{}, {"weights": "int4", "kv_dtype": "bf16"}], ids=["fp32", "int4"])
@pytest.mark.parametrize("number", [0, 2, 5])
def test_the_first_token_that_differs_is_named_with_the_margin_of_its_plain_step(
    number: int, settings: dict[str, str], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = open_draft(directory, ITSELF, speculate_k=3, **settings)
    with monkeypatch.context() as patch:
        positions = spoil_round(session, number, patch)
        speculated = finish(session, PROMPT, 40, sampling=SAMPLINGS["sampled"])
    plain = Stream(session, PROMPT, max_new_tokens=40, sampling=SAMPLINGS["sampled"], speculates=False)
    margins = record_margins(session, monkeypatch)
    found = find_divergence(session, speculated, plain)
    index = positions[0] - len(plain.prompt_ids)
    ours, theirs = speculated.result.token_ids, plain.result.token_ids
    assert ours[:index] == theirs[:index]
    assert index > number
    assert found == Divergence(index, ours[index], theirs[index], margins[index - 1])
    assert ours[index] != theirs[index]
    assert found.top_2_margin > 0


@tiny
@pytest.mark.parametrize(("ours", "theirs"), [(7, 10), (10, 7), (0, 3)])
def test_a_text_that_ends_earlier_than_the_other_differs_where_it_ends(
    ours: int, theirs: int, eager: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    speculated = finish(eager, PROMPT, ours)
    ids = ids_of(eager, PROMPT, 10)
    margins = record_margins(eager, monkeypatch)
    found = find_divergence(eager, speculated, Stream(eager, PROMPT, max_new_tokens=theirs, speculates=False))
    index = min(ours, theirs)
    assert found is not None
    assert (found.index, found.speculated, found.plain) == (
        index,
        ids[index] if ours > theirs else None,
        ids[index] if theirs > ours else None,
    )
    assert margins[-1] == found.top_2_margin if index else found.top_2_margin > 0


@tiny
def test_a_text_after_the_comparison_is_as_any_other(directory: Path, eager: Session) -> None:
    """Also one that would go on from the cache, which was written to by hand."""
    session = open_draft(directory, ITSELF, speculate_k=3)
    speculated = finish(session, PROMPT, 12)
    plain = Stream(session, PROMPT, max_new_tokens=20, speculates=False)
    assert find_divergence(session, speculated, plain) is not None
    prompt = [*plain.prompt_ids, *plain.result.token_ids, 7, 8, 9]
    following = finish(session, prompt, 30, reuse_cache=True)
    assert following.result.token_ids == ids_of(eager, prompt, 30)


# The default model


@pytest.fixture(scope="module")
def answer_exactly(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., None]]:
    """Compares greedy answers of the default model in exact mode; the plain ones are made once."""
    cache = tmp_path_factory.getbasetemp() / "gptfast-cache"
    share_kernels(cache)
    sessions: dict[bool, Session] = {}
    plain: dict[tuple[bool, str, int], GenerationResult] = {}

    def compare(draft: str, prompts: list[str], max_new_tokens: int, *, compile: bool = False) -> None:
        if compile not in sessions:
            sessions[compile] = load(MODEL, weights="bf16", activations="fp32", draft="ngram,int4", compile=compile)
        speculating = with_k(sessions[compile], 4, draft)
        for prompt in prompts:
            key = compile, prompt, max_new_tokens
            if key not in plain:
                plain[key] = answer(without_speculation(speculating), prompt, max_new_tokens)
            assert describe(answer(speculating, prompt, max_new_tokens)) == describe(plain[key]), prompt
        proposed, accepted = count_tokens(speculating)
        assert proposed >= accepted > 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(cache))
        yield compare


def answer(session: Session, question: str, max_new_tokens: int) -> GenerationResult:
    return complete(session, [Message("user", question)], max_new_tokens, sampling=SamplingConfig())


def read_prompts() -> list[str]:
    content = json.loads(PROMPTS.read_text(encoding="utf-8"))
    return [prompt for kind in ("mixed", "free_writing", "copy_edit") for prompt in content[kind]]


def test_there_are_fifty_prompts() -> None:
    assert len(set(read_prompts())) == 50


@default_model
@pytest.mark.parametrize("draft", ["int4", "ngram", "ngram,int4"])
def test_answers_of_the_default_model_are_those_of_plain_decoding(
    draft: str, answer_exactly: Callable[..., None]
) -> None:
    prompts = read_prompts()
    answer_exactly(draft, [*prompts[:3], *prompts[20:22], *prompts[40:43]], 16)


@pytest.mark.slow
@default_model
@pytest.mark.parametrize("draft", ["int4", "ngram", "ngram,int4"])
def test_fifty_compiled_answers_of_the_default_model_are_those_of_plain_decoding(
    draft: str, answer_exactly: Callable[..., None]
) -> None:
    answer_exactly(draft, read_prompts(), 128, compile=True)
