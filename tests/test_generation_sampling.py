"""Samples: the same for a seed, and independent of each other, of the batch and of what ran before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gptfast.config import SamplingConfig
from gptfast.errors import UserError
from gptfast.generation import Stream, generate
from gptfast.session import Session
from tests.reference.sessions import (
    PROMPT,
    complete,
    ids_of,
    load_tiny,
    random_prompt,
    write_tiny_model,
)

pytestmark = pytest.mark.usefixtures("tiny_cache")

SAMPLED = SamplingConfig(temperature=1.0, seed=7)


def test_the_same_seed_gives_the_same_text_whatever_ran_before(session: Session) -> None:
    first = ids_of(session, PROMPT, 30, sampling=SAMPLED)
    ids_of(session, random_prompt(300), 5)
    torch.manual_seed(1)
    assert ids_of(session, PROMPT, 30, sampling=SAMPLED) == first
    other = SamplingConfig(temperature=1.0, seed=8)
    assert ids_of(session, PROMPT, 30, sampling=other) != first


def test_compiled_and_eager_steps_sample_the_same_text(compiled: Session, eager: Session) -> None:
    assert ids_of(compiled, PROMPT, 60, sampling=SAMPLED) == ids_of(eager, PROMPT, 60, sampling=SAMPLED)


def test_a_checkpoints_own_sampling_counts_where_none_is_given(tmp_path: Path, eager: Session) -> None:
    asked = {"do_sample": True, "temperature": 1.5, "top_k": 5}
    session = load_tiny(write_tiny_model(tmp_path / "sampling", generation=asked))
    expected = ids_of(eager, PROMPT, 20, sampling=SamplingConfig(temperature=1.5, top_k=5))
    assert ids_of(session, PROMPT, 20) == expected
    assert ids_of(session, PROMPT, 20, sampling=SamplingConfig()) == ids_of(eager, PROMPT, 20)


def test_the_repetition_penalty_keeps_tokens_of_the_prompt_and_the_text_away(session: Session) -> None:
    prompt = random_prompt(40)
    result = complete(session, prompt, 40, sampling=SamplingConfig(repetition_penalty=1e6))
    assert len(set(result.token_ids)) == 40
    assert set(prompt).isdisjoint(result.token_ids)
    assert ids_of(session, prompt, 10, sampling=SamplingConfig(repetition_penalty=1.0)) == ids_of(session, prompt, 10)


@pytest.mark.parametrize("sampling", [SamplingConfig(), SAMPLED, SamplingConfig(temperature=1, repetition_penalty=1.3)])
def test_samples_do_not_depend_on_the_batch_size(sampling: SamplingConfig, directory: Path, eager: Session) -> None:
    expected = [r.token_ids for r in generate(eager, PROMPT, max_new_tokens=25, sampling=sampling, num_samples=5)]
    if sampling.temperature:
        assert len(set(expected)) == 5
    for batch_size in (2, 3):
        session = load_tiny(directory, batch_size=batch_size)
        results = generate(session, PROMPT, max_new_tokens=25, sampling=sampling, num_samples=5)
        assert [result.token_ids for result in results] == expected
        assert {result.batch_size for result in results} == {batch_size}


@pytest.mark.slow
def test_compiled_rows_equal_single_ones(directory: Path, eager: Session) -> None:
    expected = [r.token_ids for r in generate(eager, PROMPT, max_new_tokens=25, sampling=SAMPLED, num_samples=2)]
    session = load_tiny(directory, batch_size=2, compile=True)
    results = generate(session, PROMPT, max_new_tokens=25, sampling=SAMPLED, num_samples=2)
    assert session.runner.is_compiled
    assert [result.token_ids for result in results] == expected


def test_rows_end_apart(tmp_path: Path, eager: Session) -> None:
    full = [r.token_ids for r in generate(eager, PROMPT, max_new_tokens=25, sampling=SAMPLED, num_samples=3)]
    end = full[1][4]
    session = load_tiny(write_tiny_model(tmp_path / "ending", eos_ids=[end]), batch_size=3)
    results = generate(session, PROMPT, max_new_tokens=25, sampling=SAMPLED, num_samples=3)
    for ids, result in zip(full, results, strict=True):
        assert result.token_ids == (ids[: ids.index(end) + 1] if end in ids else ids)
        assert result.finish_reason == ("eos" if end in ids else "length")
    assert len({result.new_tokens for result in results}) > 1


def test_more_rows_than_the_session_has_are_refused(eager: Session) -> None:
    with pytest.raises(UserError, match=r"2 samples .* batch size 1"):
        Stream(eager, PROMPT, sample_ids=(0, 1))
    with pytest.raises(UserError, match="0 samples"):
        generate(eager, PROMPT, num_samples=0)
