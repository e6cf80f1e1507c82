"""A draft model, whose cache must hold the text whatever was accepted, and drafts cut from the target."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gptfast.config import SamplingConfig
from gptfast.errors import UserError
from gptfast.runner import INITIAL_CAPACITY, Runner
from gptfast.sampling import Sampler
from gptfast.session import Session
from gptfast.speculation.controller import SpeculationStatistics
from gptfast.speculation.draft import DraftModel, cut_layers
from tests.reference.checkpoints import write_hf
from tests.reference.families import random_weights
from tests.reference.product import load as load_model
from tests.reference.sessions import (
    PROMPT,
    complete,
    ids_of,
    load_tiny,
    random_prompt,
    tiny_config,
    write_tiny_model,
)
from tests.reference.tokenizers import train_byte_level, write_tokenizer

pytestmark = pytest.mark.usefixtures("tiny_cache")

SAMPLINGS = {"greedy": SamplingConfig(), "sampled": SamplingConfig(temperature=0.8, seed=5)}


def load_with_itself(directory: Path, k: int, **settings: Any) -> Session:
    """A session whose draft is its own model, loaded once more."""
    return load_tiny(directory, draft=str(directory), speculate_k=k, **settings)


def get_statistics(session: Session) -> SpeculationStatistics:
    assert session.speculator is not None
    [statistics] = session.speculator.statistics.values()
    return statistics


def make_greedy() -> Sampler:
    return Sampler(SamplingConfig(), [0], tiny_config().vocab_size)


# The target as its own draft


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("k", range(1, 9))
def test_all_is_accepted_of_a_draft_that_is_the_target(k: int, sampling: str, directory: Path, eager: Session) -> None:
    session = load_with_itself(directory, k)
    result = complete(session, PROMPT, 61, sampling=SAMPLINGS[sampling])
    assert result.token_ids == ids_of(eager, PROMPT, 61, sampling=SAMPLINGS[sampling])
    statistics = get_statistics(session)
    assert statistics.accepted == statistics.proposed
    # The first token comes from the prompt, and each step yields all that was asked for and one more.
    assert result.decode_steps == -(-60 // (k + 1))


@pytest.mark.parametrize("is_compiled", [False, True])
def test_all_is_accepted_where_both_caches_grow(
    is_compiled: bool, directory: Path, eager: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(INITIAL_CAPACITY, "cpu", 64)
    session = load_with_itself(directory, 7, compile=is_compiled)
    assert session.speculator is not None
    [draft] = session.speculator.list_runners()
    assert draft.capacity == session.runner.capacity == 64
    prompt = random_prompt(50, seed=8)
    assert ids_of(session, prompt, 150) == ids_of(eager, prompt, 150)
    assert session.runner.capacity == 200
    assert draft.capacity == 200
    statistics = get_statistics(session)
    assert statistics.accepted == statistics.proposed > 120


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("length", [40, 95, 96, 97, 150])
def test_a_text_goes_on_where_the_draft_s_context_ends(
    length: int, k: int, directory: Path, eager: Session, tmp_path: Path
) -> None:
    short = write_tiny_model(tmp_path / "short", context=96)
    session = load_tiny(directory, draft=str(short), speculate_k=k)
    prompt = random_prompt(length, seed=length)
    assert ids_of(session, prompt, 80) == ids_of(eager, prompt, 80)
    statistics = get_statistics(session)
    assert statistics.accepted == statistics.proposed
    # It reads the tokens before place 96, so the text has 97 or 98 when the target goes on alone.
    assert (statistics.rounds > 0) == (length < 96)
    assert min(79, length + 80 - 98) <= statistics.plain_steps <= min(79, length + 80 - 97)


# What the cache holds


def test_proposals_do_not_depend_on_what_was_read_before(directory: Path) -> None:
    """Texts that grow by what was proposed or by something else, shrink, and turn into others."""
    used = DraftModel(load_tiny(directory).runner, tiny_config().vocab_size)
    other = load_tiny(directory).runner
    generator = random.Random(0)
    text = random_prompt(30)
    proposed: list[int] = []
    for turn in range(150):
        kind = generator.choice(["all", "all", "some", "none", "more", "fewer", "new"])
        if kind == "all":
            text = [*text, *proposed, generator.randrange(3, 400)]
        elif kind == "some":
            text = [*text, *proposed[: generator.randint(0, len(proposed))], generator.randrange(3, 400)]
        elif kind == "more":
            text = [*text, *random_prompt(generator.choice([2, 15, 16, 17, 40]), seed=turn)]
        elif kind == "fewer":
            text = text[: generator.randint(1, len(text))]
        elif kind == "new":
            text = random_prompt(generator.randint(1, 40), seed=turn)
            if generator.random() < 0.5:
                used.begin(text)
        k = generator.randint(0, 8)
        proposed = used.propose(text, k, make_greedy()).tolist()
        assert len(proposed) == k
        assert proposed == DraftModel(other, tiny_config().vocab_size).propose(text, k, make_greedy()).tolist(), turn


def test_a_round_reads_only_what_the_cache_lacks(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = load_tiny(directory).runner
    draft = DraftModel(runner, tiny_config().vocab_size)
    text = random_prompt(50)
    draft.begin(text)
    read: list[tuple[int, int]] = []
    decode, verify = runner.decode, runner.verify

    def record(step: Any) -> Any:
        def call(tokens: Tensor, position: int) -> Tensor:
            read.append((position, len(tokens)))
            logits: Tensor = step(tokens, position)
            return logits

        return call

    monkeypatch.setattr(runner, "decode", record(decode))
    monkeypatch.setattr(runner, "verify", record(verify))
    first = draft.propose(text, 3, make_greedy()).tolist()
    assert read == [(49, 1), (50, 1), (51, 1)]
    read.clear()
    # All were accepted: the last of them was not read yet, and is read together with the target's own token.
    text = [*text, *first, 7]
    second = draft.propose(text, 2, make_greedy()).tolist()
    assert read == [(52, 2), (54, 1)]
    read.clear()
    # One was accepted.
    draft.propose([*text, second[0], 9], 1, make_greedy())
    assert read == [(55, 1)]


def test_a_draft_proposes_no_more_than_it_is_asked_for_and_its_context_holds(tmp_path: Path) -> None:
    runner = load_tiny(write_tiny_model(tmp_path / "short", context=64)).runner
    draft = DraftModel(runner, tiny_config().vocab_size)
    lengths = {n: len(draft.propose(random_prompt(n), 8, make_greedy())) for n in (1, 56, 57, 58, 64, 65, 90)}
    assert lengths == {1: 8, 56: 8, 57: 8, 58: 7, 64: 1, 65: 0, 90: 0}
    assert len(draft.propose(random_prompt(5), 0, make_greedy())) == 0
    assert len(draft.propose(random_prompt(5), 3, make_greedy())) == 3


def test_choices_are_made_from_the_target_s_vocabulary_after_the_tokens_drafted_so_far(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[tuple[int, ...], int, list[int]]] = []
    propose = Sampler.propose

    def spy(sampler: Sampler, logits: Tensor, position: int, drafted: Tensor) -> Tensor:
        seen.append((tuple(logits.shape), position, drafted.tolist()))
        return propose(sampler, logits, position, drafted)

    monkeypatch.setattr(Sampler, "propose", spy)
    drafted = DraftModel(load_tiny(directory).runner, 300).propose(random_prompt(9), 3, make_greedy()).tolist()
    assert max(drafted) < 300
    assert seen == [((1, 300), 9, []), ((1, 300), 10, drafted[:1]), ((1, 300), 11, drafted[:2])]


# The target's first layers


@pytest.mark.parametrize("weights", ["stored", "int4"])
@pytest.mark.parametrize("has_kernels", [True, False])
def test_cut_layers_compute_what_a_checkpoint_of_these_layers_does(
    has_kernels: bool, weights: str, directory: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if not has_kernels:
        request.getfixturevalue("no_kernels")
    target = load_tiny(directory, weights=weights)
    first = {name: tensor for name, tensor in random_weights(tiny_config()).items() if "layers.1." not in name}
    cut = write_hf(tmp_path / "cut", first, replace(tiny_config(), n_layers=1))
    write_tokenizer(cut, train_byte_level())
    expected = load_tiny(cut, weights=weights).runner.score(random_prompt(40))
    assert torch.equal(Runner(cut_layers(target.runner.model, 1)).score(random_prompt(40)), expected)


def test_cut_layers_take_no_memory_for_weights_and_leave_the_target_alone(directory: Path) -> None:
    model = load_model(directory, 1)
    target = Runner(model)
    expected = target.prefill(random_prompt(40)).clone()
    target.prefill(random_prompt(39))
    draft = Runner(cut_layers(model, 1))
    draft.score(random_prompt(60, seed=9))
    held = {parameter.data_ptr() for parameter in model.parameters()}
    assert {parameter.data_ptr() for parameter in draft.model.parameters()} < held
    assert torch.equal(target.decode(torch.tensor(random_prompt(40)[39:]), 39), expected)


@pytest.mark.parametrize("n_layers", [0, 2, 30])
def test_a_number_of_layers_that_makes_no_draft_is_refused_with_the_range(n_layers: int, directory: Path) -> None:
    with pytest.raises(UserError, match=f"{n_layers} layers .* 2; use layers:1 to layers:1"):
        cut_layers(load_model(directory, 1), n_layers)
