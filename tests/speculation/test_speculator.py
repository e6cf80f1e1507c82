"""Rounds with toy models, whose probabilities are known, and with proposers that are always right or always wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import pytest
import torch
from torch import Tensor

from gptfast.config import SamplingConfig
from gptfast.runner import Runner
from gptfast.sampling import Sampler
from gptfast.speculation.controller import SpeculationController
from gptfast.speculation.draft import DraftModel
from gptfast.speculation.proposer import Proposer
from gptfast.speculation.speculator import Lane, Speculator
from tests.reference.sampling import chi_square, chi_square_limit, target_distribution

V = 6
PROMPT = [0, 1]
PLAIN = SamplingConfig(temperature=1.0, seed=11)
SETTINGS = {
    "cold": replace(PLAIN, temperature=0.5),
    "plain": PLAIN,
    "hot": replace(PLAIN, temperature=1.5),
    "top-k": replace(PLAIN, top_k=3),
    "top-p": replace(PLAIN, top_p=0.8),
    "min-p": replace(PLAIN, min_p=0.2),
}
TEXTS = 100_000
ONE_IN_A_THOUSAND = 3.09
"""Standard deviations."""


def make_table(seed: int) -> Tensor:
    """Logits (V, V, V) of the next token after any two."""
    return 1.2 * torch.randn(V, V, V, generator=torch.Generator().manual_seed(seed))


P = make_table(0)
Q = P + 0.7 * make_table(1)
"""The draft's: often the target's choice, and often not."""


class ToyRunner:
    """Stands for a runner whose model looks at the last two tokens, as its cache holds them.

    Slots behind those that were written last are lost, so a text with a hole in the cache is found out.
    """

    batch_size = 1
    context = 1_000
    device = torch.device("cpu")
    accept, draft, fetch, note_moment = Runner.accept, Runner.draft, Runner.fetch, Runner.note_moment
    _recorded = graphs = None

    def __init__(self, table: Tensor) -> None:
        self.sizes: list[int] = []
        self.vocab_size = table.shape[-1]
        self._table = table
        self._held: list[int] = []

    def prefill(self, tokens: Sequence[int], start: int = 0) -> Tensor:
        return self._write(list(tokens), start)[-1:]

    def decode(self, tokens: Tensor, position: int) -> Tensor:
        self.sizes.append(1)
        return self._write(tokens.tolist(), position)

    def verify(self, tokens: Tensor, position: int) -> Tensor:
        self.sizes.append(len(tokens))
        return self._write(tokens.tolist(), position)

    def reserve(self, length: int) -> None:
        assert 0 < length <= self.context

    def _write(self, tokens: list[int], position: int) -> Tensor:
        assert 0 <= position <= len(self._held)
        assert tokens
        self._held[position:] = tokens
        pairs = [(self._held[max(i - 1, 0)], self._held[i]) for i in range(position, len(self._held))]
        return torch.stack([self._table[pair] for pair in pairs])


def make_runner(table: Tensor = P) -> Runner:
    return cast(Runner, ToyRunner(table))


def get_sizes(runner: Runner) -> list[int]:
    return cast(ToyRunner, runner).sizes


def make_speculator(*proposers: Proposer, k: int = 4) -> tuple[Speculator, Runner]:
    """One that asks each in turn for `k` tokens, and its target."""
    target = make_runner()
    lanes = [
        Lane(f"lane {i}", proposer, SpeculationController(max_k=k, fixed_k=k)) for i, proposer in enumerate(proposers)
    ]
    return Speculator(target, lanes), target


def make_sampler(sampling: SamplingConfig = PLAIN, sample_id: int = 0) -> Sampler:
    return Sampler(sampling, PROMPT, V, sample_ids=(sample_id,))


def decode_plainly(count: int, sampling: SamplingConfig = PLAIN, prompt: Sequence[int] = PROMPT) -> list[int]:
    sampler, text = Sampler(sampling, prompt, V), list(prompt)
    while len(text) < len(prompt) + count:
        text.append(int(sampler.choose(P[text[-2], text[-1]][None], len(text))))
    return text[len(prompt) :]


def extend(
    speculator: Speculator, target: Runner, count: int, sampler: Sampler, prompt: Sequence[int] = PROMPT
) -> list[int]:
    """`count` tokens after the prompt, by as many rounds as it takes."""
    target.prefill(prompt[:-1])
    speculator.begin(prompt)
    text, end = list(prompt), len(prompt) + count
    while len(text) < end:
        added = speculator.advance(text, sampler, end - len(text))
        assert 1 <= len(added) <= end - len(text)
        text += added
    return text[len(prompt) :]


# The distribution

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def keep_what_the_target_chose(first: Tensor, draft: Tensor, after_draft: Tensor, after_first: Tensor) -> Tensor:
    """The rule of `Speculator`: the second token comes from the round if the draft was right, else from the next."""
    return torch.stack([first, torch.where(draft == first, after_draft, after_first)], dim=1)


def accept_everything(first: Tensor, draft: Tensor, after_draft: Tensor, after_first: Tensor) -> Tensor:
    return torch.stack([draft, after_draft], dim=1)


def forget_to_roll_back(first: Tensor, draft: Tensor, after_draft: Tensor, after_first: Tensor) -> Tensor:
    """What follows the draft is kept where the draft was wrong, too."""
    return torch.stack([first, after_draft], dim=1)


def draw_pairs(sampling: SamplingConfig, rule: Rule) -> tuple[Tensor, Tensor]:
    """The first two tokens (`TEXTS`, 2) of as many texts, each with noise of its own, and which drafts were right."""
    sampler = Sampler(sampling, PROMPT, V, sample_ids=range(TEXTS))
    none, position = torch.empty(0, dtype=torch.int64), len(PROMPT)

    def expand(table: Tensor) -> Tensor:
        return table[PROMPT[0], PROMPT[1]].expand(TEXTS, V)

    draft = sampler.propose(expand(Q), position, none)
    first = sampler.choose(expand(P), position)
    after_draft, after_first = (sampler.choose(P[PROMPT[1], token], position + 1) for token in (draft, first))
    return rule(first, draft, after_draft, after_first), draft == first


def exceed_limits(pairs: Tensor, sampling: SamplingConfig) -> list[bool]:
    """Whether the first tokens, the second and both together are as unlikely as one in a thousand."""
    after_prompt = target_distribution(P[PROMPT[0], PROMPT[1]].tolist(), sampling)
    after_first = [target_distribution(P[PROMPT[1], token].tolist(), sampling) for token in range(V)]
    both = [p * q for p, following in zip(after_prompt, after_first, strict=True) for q in following]
    second = [sum(both[token::V]) for token in range(V)]
    exceeded = []
    for values, size, expected in (
        (pairs[:, 0], V, after_prompt),
        (pairs[:, 1], V, second),
        (pairs[:, 0] * V + pairs[:, 1], V * V, both),
    ):
        counts = torch.bincount(values, minlength=size).tolist()
        statistic, degrees = chi_square(counts, expected)
        is_impossible = any(count for count, p in zip(counts, expected, strict=True) if p == 0)
        exceeded.append(is_impossible or statistic > chi_square_limit(degrees, ONE_IN_A_THOUSAND))
    return exceeded


@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_follow_the_distribution_of_the_target(name: str) -> None:
    pairs, is_right = draw_pairs(SETTINGS[name], keep_what_the_target_chose)
    assert 0.3 < is_right.double().mean() < 0.95
    assert exceed_limits(pairs, SETTINGS[name]) == [False, False, False]


@pytest.mark.parametrize("name", SETTINGS)
def test_the_statistic_notices_wrong_rules(name: str) -> None:
    pairs, _ = draw_pairs(SETTINGS[name], accept_everything)
    assert exceed_limits(pairs, SETTINGS[name])[0]
    pairs, _ = draw_pairs(SETTINGS[name], forget_to_roll_back)
    assert exceed_limits(pairs, SETTINGS[name]) == [False, True, True]


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("name", SETTINGS)
def test_rounds_yield_the_tokens_whose_distribution_was_tested(name: str, k: int) -> None:
    pairs, is_right = draw_pairs(SETTINGS[name], keep_what_the_target_chose)
    n_accepted = 0
    for sample_id in range(60):
        speculator, target = make_speculator(DraftModel(make_runner(Q), V), k=k)
        tokens = extend(speculator, target, 2, make_sampler(SETTINGS[name], sample_id))
        assert tokens == pairs[sample_id].tolist()
        n_accepted += speculator.statistics["lane 0"].accept_counts[0]
    assert n_accepted >= int(is_right[:60].sum()) > 0


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_long_text_is_that_of_plain_decoding(name: str, k: int) -> None:
    speculator, target = make_speculator(DraftModel(make_runner(Q), V), k=k)
    assert extend(speculator, target, 60, make_sampler(SETTINGS[name])) == decode_plainly(60, SETTINGS[name])
    statistics = speculator.statistics["lane 0"]
    assert 0 < statistics.accepted < statistics.proposed


# Proposers that are always right or always wrong

COUNT = 50
TRUTH = decode_plainly(COUNT)


class KnowingProposer:
    """Knows the text and proposes how it goes on, each token moved by `shift`, and `surplus` more than it is asked.

    `asked` is what it was asked for, and `begun` the prompts that it has read.
    """

    def __init__(
        self, *, shift: int = 0, surplus: int = 0, as_tensor: bool = False, truth: Sequence[int] = TRUTH
    ) -> None:
        self.asked: list[int] = []
        self.begun: list[list[int]] = []
        self._shift, self._surplus, self._as_tensor, self._truth = shift, surplus, as_tensor, truth

    def begin(self, tokens: Sequence[int]) -> None:
        self.begun.append(list(tokens))

    def propose(self, tokens: Sequence[int], k: int, sampler: Sampler) -> Sequence[int] | Tensor:
        self.asked.append(k)
        start = len(tokens) - len(PROMPT)
        following = [(token + self._shift) % V for token in self._truth[start : start + max(0, k + self._surplus)]]
        return torch.tensor(following, dtype=torch.int64) if self._as_tensor else following


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("k", range(1, 9))
def test_everything_is_accepted_of_a_proposer_that_is_always_right(k: int, as_tensor: bool) -> None:
    speculator, target = make_speculator(KnowingProposer(as_tensor=as_tensor), k=k)
    assert extend(speculator, target, COUNT, make_sampler()) == TRUTH
    full, rest = divmod(COUNT, k + 1)
    assert get_sizes(target) == [k + 1] * full + [rest] * (rest > 0)
    statistics = speculator.statistics["lane 0"]
    assert statistics.accepted == statistics.proposed == COUNT - len(get_sizes(target))
    assert speculator.rounds + speculator.plain_steps == len(get_sizes(target))
    assert speculator.plain_steps == (rest == 1)


@pytest.mark.parametrize("k", range(1, 9))
def test_nothing_is_accepted_of_a_proposer_that_is_always_wrong(k: int) -> None:
    speculator, target = make_speculator(KnowingProposer(shift=1), k=k)
    assert extend(speculator, target, COUNT, make_sampler()) == TRUTH
    assert len(get_sizes(target)) == COUNT
    assert speculator.statistics["lane 0"].accepted == 0
    assert speculator.statistics["lane 0"].proposed_counts[0] == speculator.rounds == COUNT - 1


def test_a_proposer_with_fewer_tokens_than_it_is_asked_for_gets_shorter_rounds() -> None:
    speculator, target = make_speculator(KnowingProposer(surplus=-2), k=5)
    assert extend(speculator, target, 41, make_sampler()) == TRUTH[:41]
    # 5 tokens are left then, of which 4 are asked for; and then 2, of which 1 is.
    assert get_sizes(target) == [4] * 9 + [3, 1, 1]


def test_a_proposer_without_an_idea_costs_plain_steps() -> None:
    proposer = KnowingProposer(surplus=-5)
    speculator, target = make_speculator(proposer, k=5)
    assert extend(speculator, target, COUNT, make_sampler()) == TRUTH
    assert get_sizes(target) == [1] * COUNT
    assert (speculator.rounds, speculator.plain_steps) == (0, COUNT)
    assert speculator.statistics["lane 0"].plain_steps == COUNT
    assert proposer.asked[0] == 5


@pytest.mark.parametrize("as_tensor", [False, True])
def test_no_more_is_verified_than_was_asked_for(as_tensor: bool) -> None:
    speculator, target = make_speculator(KnowingProposer(surplus=3, as_tensor=as_tensor), k=4)
    assert extend(speculator, target, COUNT, make_sampler()) == TRUTH
    assert get_sizes(target) == [5] * 10


def test_no_token_is_asked_for_that_could_not_be_kept() -> None:
    proposer = KnowingProposer()
    speculator, target = make_speculator(proposer, k=8)
    assert extend(speculator, target, 13, make_sampler()) == TRUTH[:13]
    assert proposer.asked == [8, 3]
    speculator, target = make_speculator(proposer, k=8)
    assert extend(speculator, target, 1, make_sampler()) == TRUTH[:1]
    assert proposer.asked == [8, 3]


def test_a_second_text_is_not_mixed_up_with_the_first() -> None:
    """It is shorter, and begins as the first did or in another way."""
    speculator, target = make_speculator(DraftModel(make_runner(Q), V), k=4)
    for prompt in ([0, 1, *TRUTH[:30]], [0, 1, *TRUTH[:7]], [0, 1], [3, 4, 5], [0, 1, *TRUTH[:20]]):
        sampler = Sampler(PLAIN, prompt, V)
        assert extend(speculator, target, 12, sampler, prompt) == decode_plainly(12, PLAIN, prompt)


# Several proposers


def test_a_proposer_is_asked_when_those_before_it_have_no_idea() -> None:
    silent, right = KnowingProposer(surplus=-4), KnowingProposer()
    speculator, target = make_speculator(silent, right)
    assert extend(speculator, target, 20, make_sampler()) == TRUTH[:20]
    assert get_sizes(target) == [5] * 4
    assert silent.asked == right.asked
    passed, took_part = speculator.statistics["lane 0"], speculator.statistics["lane 1"]
    assert (passed.rounds, passed.plain_steps) == (0, 4)
    assert (took_part.rounds, took_part.plain_steps) == (4, 0)


def test_a_proposer_is_not_asked_when_one_before_it_has_an_idea() -> None:
    first, second = KnowingProposer(shift=1), KnowingProposer()
    speculator, target = make_speculator(first, second)
    assert extend(speculator, target, 10, make_sampler()) == TRUTH[:10]
    assert len(get_sizes(target)) == 10
    assert second.asked == []
    assert speculator.statistics["lane 1"].plain_steps == 1  # the last, for which no one is asked


def test_only_proposers_that_will_be_asked_read_the_prompt() -> None:
    asked, resting = KnowingProposer(), KnowingProposer()
    lanes = [
        Lane("asked", asked, SpeculationController(max_k=2, fixed_k=2)),
        Lane("resting", resting, SpeculationController(max_k=2, fixed_k=0)),
    ]
    target = make_runner()
    assert extend(Speculator(target, lanes), target, 9, make_sampler()) == TRUTH[:9]
    assert asked.begun == [PROMPT]
    assert (resting.begun, resting.asked) == ([], [])


# What a proposer has yet to read


def get_lags(speculator: Speculator) -> list[int]:
    """Tokens that were decoded without each lane, as it knows of them."""
    return [lane.controller._costs.lag for lane in speculator.lanes]


def test_a_later_proposer_knows_how_many_tokens_went_by_in_the_rounds_of_the_first() -> None:
    right, resting = KnowingProposer(), KnowingProposer()
    speculator, target = make_speculator(right, resting, k=3)
    target.prefill(PROMPT[:-1])
    speculator.begin(PROMPT)
    text, sampler = list(PROMPT), make_sampler()
    for done in (4, 8, 12):
        text += speculator.advance(text, sampler, COUNT)
        assert text == [*PROMPT, *TRUTH[:done]]
        assert get_lags(speculator) == [0, done]
    assert resting.asked == []


def test_a_lag_ends_with_the_round_that_reads_it() -> None:
    """The first proposer has ideas for 8 tokens only, and a plain step follows each of which no one has one."""
    first, second = KnowingProposer(truth=TRUTH[:8]), KnowingProposer(truth=TRUTH[:14])
    speculator, target = make_speculator(first, second, k=3)
    target.prefill(PROMPT[:-1])
    speculator.begin(PROMPT)
    text, sampler, lags = list(PROMPT), make_sampler(), []
    while len(text) < len(PROMPT) + 17:
        added = speculator.advance(text, sampler, len(PROMPT) + 17 - len(text))
        text += added
        lags.append((len(added), *get_lags(speculator)))
    assert text == [*PROMPT, *TRUTH[:17]]
    assert lags == [(4, 0, 4), (4, 0, 8), (4, 4, 0), (3, 7, 0), (1, 8, 1), (1, 9, 2)]


def test_a_proposer_that_does_not_read_the_prompt_has_all_of_it_before_it() -> None:
    first, resting = KnowingProposer(), KnowingProposer()
    lanes = [
        Lane("first", first, SpeculationController(max_k=2, fixed_k=2)),
        Lane("resting", resting, SpeculationController(max_k=2, fixed_k=0)),
    ]
    target = make_runner()
    speculator = Speculator(target, lanes)
    assert extend(speculator, target, 9, make_sampler()) == TRUTH[:9]
    assert get_lags(speculator) == [0, len(PROMPT) + 9]
