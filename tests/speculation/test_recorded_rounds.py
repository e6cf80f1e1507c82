"""Rounds whose steps are recorded, on a back end that holds them to the rules of CUDA graphs without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gptfast.config import SamplingConfig
from gptfast.generation import Stream
from gptfast.replay import CAUGHT_UP, ROUND_SIZES
from gptfast.runner import INITIAL_CAPACITY, MOST_VERIFIED, Runner
from gptfast.sampling import Sampler
from gptfast.session import Session
from gptfast.speculation.controller import SpeculationController
from gptfast.speculation.draft import DraftModel
from gptfast.speculation.ngram import NgramProposer
from gptfast.speculation.speculator import Lane, Speculator
from tests.reference.graphs import BrokenRule, CheckedGraphs
from tests.reference.sessions import PROMPT, complete, ids_of, load_tiny, random_prompt, tiny_config, write_tiny_model
from tests.test_replay import SAMPLINGS

pytestmark = pytest.mark.usefixtures("tiny_cache")

REPETITIVE = random_prompt(12) * 4
K = 5


def record_steps(runner: Runner) -> tuple[Runner, CheckedGraphs]:
    graphs = CheckedGraphs()
    return Runner(runner.model, kv_dtype=runner.kv_dtype, graphs=graphs), graphs


def open_speculating(
    directory: Path, draft: str = "stored", *, k: int = K, ngram: bool = False
) -> tuple[Session, CheckedGraphs, CheckedGraphs]:
    """A session whose target and draft replay steps; the draft is the target from such weights."""
    session = load_tiny(directory)
    target, target_graphs = record_steps(session.runner)
    runner, draft_graphs = record_steps(load_tiny(directory, weights=draft).runner)
    proposer = NgramProposer() if ngram else DraftModel(runner, target.vocab_size)
    lane = Lane("draft", proposer, SpeculationController(max_k=15, fixed_k=k))
    return replace(session, runner=target, speculator=Speculator(target, [lane])), target_graphs, draft_graphs


def get_counts(session: Session) -> tuple[int, int]:
    assert session.speculator is not None
    [statistics] = session.speculator.statistics.values()
    return statistics.accepted, statistics.proposed


# Texts


@pytest.mark.parametrize(
    "name",
    [name if name in ("greedy", "everything") else pytest.param(name, marks=pytest.mark.slow) for name in SAMPLINGS],
)
def test_a_draft_that_is_the_target_is_accepted_whole(name: str, directory: Path, eager: Session) -> None:
    session, target, draft = open_speculating(directory)
    for seed in (0, 1):
        prompt, sampling = random_prompt(30, seed=seed), SAMPLINGS[name]
        expected = complete(eager, prompt, 38, sampling=sampling, ignore_eos=True).token_ids
        assert complete(session, prompt, 38, sampling=sampling, ignore_eos=True).token_ids == expected
    accepted, proposed = get_counts(session)
    assert accepted == proposed == 2 * 6 * K
    # After the token of the prompt come 6 rounds of 6 tokens and a plain step.
    assert (target.recorded, target.replayed) == (len(ROUND_SIZES), 2 * 7)
    assert (draft.recorded, draft.replayed) == (2, proposed)


@pytest.mark.parametrize("k", [3, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 8, 15))])
@pytest.mark.parametrize("name", ["greedy", "greedy with a penalty", "everything"])
def test_texts_are_those_of_plain_decoding_whatever_is_drafted(
    name: str, k: int, directory: Path, eager: Session
) -> None:
    session, target, _ = open_speculating(directory, "int4", k=k)
    expected = ids_of(eager, PROMPT, 30, sampling=SAMPLINGS[name])
    assert ids_of(session, PROMPT, 30, sampling=SAMPLINGS[name]) == expected
    accepted, proposed = get_counts(session)
    assert 0 < accepted < proposed
    assert target.recorded <= len(ROUND_SIZES)


@pytest.mark.parametrize("name", ["greedy", "sampled"])
def test_looked_up_tokens_are_verified_by_the_same_recordings(name: str, directory: Path, eager: Session) -> None:
    session, target, _ = open_speculating(directory, ngram=True, k=8)
    expected = ids_of(eager, REPETITIVE, 50, sampling=SAMPLINGS[name])
    assert ids_of(session, REPETITIVE, 50, sampling=SAMPLINGS[name]) == expected
    assert get_counts(session)[1] > 0
    assert target.recorded <= len(ROUND_SIZES)


def test_an_end_of_sequence_inside_a_round_is_the_last_token(tmp_path: Path, directory: Path) -> None:
    free = ids_of(load_tiny(directory), PROMPT, 20)
    end = free[6]
    ends = write_tiny_model(tmp_path / "ends", eos_ids=[end])
    session, _, _ = open_speculating(ends, k=15)
    result = complete(session, PROMPT, 20)
    assert result.token_ids == free[: free.index(end) + 1]
    assert result.finish_reason == "eos"


def test_other_values_of_the_same_kind_record_nothing_again(directory: Path, eager: Session) -> None:
    session, target, draft = open_speculating(directory, "int4")
    recorded: list[tuple[int, int]] = []
    for temperature, seed in ((0.3, 0), (1.5, 2**62), (0.9, 7)):
        sampling = SamplingConfig(temperature=temperature, seed=seed)
        assert ids_of(session, PROMPT, 30, sampling=sampling) == ids_of(eager, PROMPT, 30, sampling=sampling)
        recorded.append((target.recorded, draft.recorded))
    assert recorded[0] == recorded[2]


def test_both_caches_grow_in_the_middle_of_a_text(
    directory: Path, eager: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(INITIAL_CAPACITY, "cpu", 64)
    session, _, _ = open_speculating(directory)
    prompt = random_prompt(50, seed=8)
    assert ids_of(session, prompt, 100) == ids_of(eager, prompt, 100)
    accepted, proposed = get_counts(session)
    assert accepted == proposed > 70


def test_a_text_may_fill_the_context(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "short", context=64)
    session, _, _ = open_speculating(directory, k=15)
    prompt = random_prompt(40)
    assert ids_of(session, prompt, 24) == ids_of(load_tiny(directory), prompt, 24)


# Drafts


@pytest.mark.parametrize("missing", [1, 2, CAUGHT_UP, CAUGHT_UP + 1, 40])
@pytest.mark.parametrize("name", ["greedy", "everything"])
def test_what_is_drafted_does_not_depend_on_how_it_was_read(missing: int, name: str, directory: Path) -> None:
    text = random_prompt(50)
    sampler = Sampler(SAMPLINGS[name], text, tiny_config().vocab_size)
    found = []
    for runner in (load_tiny(directory).runner, record_steps(load_tiny(directory).runner)[0]):
        runner.prefill(text[:-missing])
        found.append(runner.draft(sampler, text[-missing:], 50 - missing, 9, 300).tolist())
    assert found[0] == found[1]
    assert max(found[0]) < 300


def test_a_full_ring_of_tokens_is_drafted(directory: Path) -> None:
    text = random_prompt(20)
    sampler = Sampler(SamplingConfig(), text, tiny_config().vocab_size)
    plain, (recorded, _) = load_tiny(directory).runner, record_steps(load_tiny(directory).runner)
    for runner in (plain, recorded):
        runner.prefill(text[:-1])
    vocab_size, count = tiny_config().vocab_size, MOST_VERIFIED - 1
    drafted = [runner.draft(sampler, text[-1:], 19, count, vocab_size).tolist() for runner in (plain, recorded)]
    assert drafted[0] == drafted[1]
    assert len(drafted[0]) == count


# The host


class HostReads(TorchDispatchMode):
    """Counts how often a value is asked for one by one."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "_local_scalar_dense" in str(func)
        return func(*args, **(kwargs or {}))


class CountedGraphs(CheckedGraphs):
    """And how often a tensor is fetched and waited for."""

    waits = 0

    def fetch(self, source: Tensor) -> Any:
        fetched = super().fetch(source)

        def wait() -> list[Any]:
            self.waits += 1
            return fetched()

        return wait


@pytest.fixture
def host_reads() -> Iterator[HostReads]:
    mode = HostReads()
    with mode:
        yield mode


@pytest.mark.parametrize("name", ["greedy", "everything"])
def test_the_host_waits_once_in_a_round(name: str, directory: Path, host_reads: HostReads) -> None:
    session = load_tiny(directory)
    graphs, draft_graphs = CountedGraphs(), CountedGraphs()
    target = Runner(session.runner.model, kv_dtype=session.runner.kv_dtype, graphs=graphs)
    draft = Runner(load_tiny(directory).runner.model, kv_dtype=session.runner.kv_dtype, graphs=draft_graphs)
    lane = Lane("draft", DraftModel(draft, target.vocab_size), SpeculationController(max_k=K, fixed_k=K))
    session = replace(session, runner=target, speculator=Speculator(target, [lane]))
    reply = Stream(session, PROMPT, max_new_tokens=1 + 4 * (K + 1), sampling=SAMPLINGS[name])
    steps = reply.iterate_steps()
    next(steps)
    before = host_reads.count
    rounds = sum(1 for _ in steps)
    assert (rounds, graphs.waits) == (4, 4)
    # What was drafted in the round before is long there by then.
    assert draft_graphs.waits == 3
    assert host_reads.count == before


def test_a_round_that_reads_a_value_would_be_noticed() -> None:
    state = torch.zeros(4)
    with pytest.raises(BrokenRule, match="to the host"):
        CheckedGraphs().record(lambda: (state.sum().item(), None)[1])
    with HostReads() as mode:
        int(state[0])
    assert mode.count == 1
