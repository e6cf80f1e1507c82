"""Sampling against the distributions of `tests.reference.sampling`."""

from __future__ import annotations

import math
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from gptfast.config import SamplingConfig
from gptfast.errors import UserError
from gptfast.sampling import (
    DIGIT_BITS,
    Sampler,
    SamplingTensors,
    adjust_logits,
    choose_tokens,
    find_kth_largest,
    sample,
)
from tests.reference.sampling import chi_square, chi_square_limit, target_distribution, top_p_set

V = 40
DRAWS = 100_000
PLAIN = SamplingConfig(temperature=1.0, seed=1234)

SETTINGS = {
    "plain": PLAIN,
    "cold": replace(PLAIN, temperature=0.5),
    "hot": replace(PLAIN, temperature=1.7),
    "top-k": replace(PLAIN, temperature=0.8, top_k=5),
    "top-p": replace(PLAIN, top_p=0.9),
    "min-p": replace(PLAIN, min_p=0.1),
    "top-k, top-p and min-p": replace(PLAIN, temperature=1.3, top_k=20, top_p=0.8, min_p=0.05),
    "repetition penalty": replace(PLAIN, repetition_penalty=1.4),
}
SEEN = (0, 3, 17, 18, 39)


def make_logits(seed: int = 0, scale: float = 1.5, size: int = V) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale


def make_seen(batch_size: int = 1) -> Tensor:
    return mark_seen(SEEN, V).expand(batch_size, V)


def mark_seen(tokens: tuple[int, ...], vocab_size: int) -> Tensor:
    return torch.isin(torch.arange(vocab_size), torch.tensor(tokens))[None]


def kept_tokens(logits: Tensor, sampling: SamplingConfig, seen: Tensor | None = None) -> set[int]:
    adjusted = adjust_logits(logits[None].clone(), sampling, seen)[0]
    return set(torch.isfinite(adjusted).nonzero().flatten().tolist())


def distribution(logits: Tensor, sampling: SamplingConfig, seen: Tensor | None = None) -> Tensor:
    return torch.softmax(adjust_logits(logits[None].clone(), sampling, seen)[0].double(), dim=-1)


def draw_at(position: int, logits: Tensor, sampling: SamplingConfig, seen: Tensor | None = None) -> list[int]:
    tokens: list[int] = sample(logits, sampling, torch.tensor([position]), seen=seen).tolist()
    return tokens


def draw(logits: Tensor, sampling: SamplingConfig, positions: int, *, batch_size: int = 1) -> Tensor:
    """(positions, batch_size) draws from one row of logits."""
    batch = logits.expand(batch_size, -1)
    seen = make_seen(batch_size) if sampling.repetition_penalty != 1 else None
    draws = [sample(batch, sampling, torch.tensor([position]), seen=seen) for position in range(positions)]
    return torch.stack(draws)


# The distribution


@pytest.mark.parametrize("name", SETTINGS)
def test_the_adjusted_distribution_equals_the_reference(name: str) -> None:
    for seed in range(5):
        logits = make_logits(seed)
        actual = distribution(logits, SETTINGS[name], make_seen())
        expected = torch.tensor(target_distribution(logits.tolist(), SETTINGS[name], SEEN), dtype=torch.float64)
        assert torch.equal(actual > 0, expected > 0)
        assert (actual - expected).abs().max() < 1e-6


@pytest.mark.parametrize("name", SETTINGS)
def test_draws_follow_the_reference_distribution(name: str) -> None:
    logits, sampling = make_logits(), SETTINGS[name]
    counts = torch.bincount(draw(logits, sampling, 100, batch_size=DRAWS // 100).flatten(), minlength=V)
    seen = SEEN if sampling.repetition_penalty != 1 else ()
    expected = target_distribution(logits.tolist(), sampling, seen)
    assert all(count == 0 for count, p in zip(counts.tolist(), expected, strict=True) if p == 0)
    statistic, degrees = chi_square(counts.tolist(), expected)
    assert statistic < chi_square_limit(degrees)


def test_the_chi_square_test_notices_a_wrong_temperature() -> None:
    logits = make_logits()
    counts = torch.bincount(draw(logits, PLAIN, 100, batch_size=DRAWS // 100).flatten(), minlength=V)
    wrong = target_distribution(logits.tolist(), replace(PLAIN, temperature=1.05))
    statistic, degrees = chi_square(counts.tolist(), wrong)
    assert statistic > chi_square_limit(degrees)


def test_draws_follow_the_distribution_in_rare_tokens_of_a_large_vocabulary() -> None:
    """Noise in float32 has a coarse tail: with 20,000 unlikely tokens the body must still be right."""
    logits = torch.full((20_000,), -8.0)
    logits[:4] = torch.tensor([2.0, 1.0, 0.5, 0.0])
    tokens = draw(logits, PLAIN, 100, batch_size=16).flatten()
    groups = torch.where(tokens < 4, tokens, 4)
    probabilities = torch.softmax(logits.double(), dim=-1)
    expected = [*probabilities[:4].tolist(), float(probabilities[4:].sum())]
    statistic, degrees = chi_square(torch.bincount(groups, minlength=5).tolist(), expected)
    assert statistic < chi_square_limit(degrees)
    tail = tokens[tokens >= 4]
    assert tail.unique().numel() > 0.9 * tail.numel()


# Greedy


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_greedy_takes_the_lowest_of_equal_logits(dtype: torch.dtype) -> None:
    logits = torch.zeros(2, V, dtype=dtype)
    logits[0, [7, 30]] = 3.0
    logits[1, [39, 11, 12]] = 80.0
    for position in range(20):
        assert draw_at(position, logits.float(), replace(PLAIN, temperature=0.0)) == [7, 11]


def test_greedy_is_exact_where_dividing_by_a_tiny_temperature_overflows() -> None:
    logits = torch.full((1, V), 79.9375)
    logits[0, 23] = 80.0  # the next larger fp16 number
    assert draw_at(0, logits, replace(PLAIN, temperature=0.0)) == [23]


def test_greedy_honours_the_repetition_penalty() -> None:
    logits = make_logits()
    best, second = logits.topk(2).indices.tolist()
    sampling = replace(PLAIN, temperature=0.0, repetition_penalty=10.0)
    assert draw_at(0, logits[None], sampling, mark_seen((), V)) == [best]
    assert draw_at(0, logits[None], sampling, mark_seen((best,), V)) == [second]


@pytest.mark.parametrize("temperature", [1e-6, 1e-3])
def test_a_tiny_temperature_is_nearly_greedy_and_finite(temperature: float) -> None:
    logits = make_logits(scale=50.0)
    tokens = draw(logits, replace(PLAIN, temperature=temperature), 50)
    assert tokens.unique().tolist() == [int(logits.argmax())]


# Which tokens are kept


@pytest.mark.parametrize("top_k", [None, 0, -1, V, V + 1])
def test_top_k_that_excludes_nothing(top_k: int | None) -> None:
    assert kept_tokens(make_logits(), replace(PLAIN, top_k=top_k)) == set(range(V))


def test_top_k_of_one_is_greedy() -> None:
    logits = make_logits()
    assert kept_tokens(logits, replace(PLAIN, top_k=1)) == {int(logits.argmax())}
    assert draw(logits, replace(PLAIN, top_k=1), 20).unique().tolist() == [int(logits.argmax())]


def test_top_k_keeps_all_tokens_tied_with_the_last() -> None:
    logits = torch.zeros(V)
    logits[[4, 9]] = 5.0
    logits[[2, 20, 33]] = 3.0
    assert kept_tokens(logits, replace(PLAIN, top_k=3)) == {4, 9, 2, 20, 33}
    assert kept_tokens(logits, replace(PLAIN, top_k=1)) == {4, 9}


@pytest.mark.parametrize("top_p", [0.0, 1e-9])
def test_top_p_keeps_at_least_one_token(top_p: float) -> None:
    logits = make_logits()
    assert kept_tokens(logits, replace(PLAIN, top_p=top_p)) == {int(logits.argmax())}


def test_top_p_of_one_keeps_all_tokens() -> None:
    assert kept_tokens(make_logits(scale=20.0), replace(PLAIN, top_p=1.0)) == set(range(V))


def test_top_p_keeps_all_tokens_tied_with_the_last() -> None:
    logits = torch.zeros(V)
    logits[[4, 9]] = 9.0
    logits[[2, 20, 33]] = 7.0
    assert kept_tokens(logits, replace(PLAIN, top_p=0.3)) == {4, 9}
    assert kept_tokens(logits, replace(PLAIN, top_p=0.9)) == {4, 9, 2, 20, 33}


def test_top_p_adds_up_a_large_vocabulary_precisely() -> None:
    logits = make_logits(seed=3, scale=0.3, size=128_000)
    kept = adjust_logits(logits[None], replace(PLAIN, top_p=0.9), None)[0].isfinite()
    assert float(torch.softmax(logits.double(), dim=-1)[kept].sum()) == pytest.approx(0.9, abs=2e-5)


def test_min_p_of_one_keeps_the_most_likely_tokens() -> None:
    logits = torch.zeros(V)
    logits[[4, 9]] = 5.0
    assert kept_tokens(logits, replace(PLAIN, min_p=1.0)) == {4, 9}


def test_filters_apply_in_the_documented_order() -> None:
    """Top-p after top-k: 0.5 of what the two best hold is the best alone, 0.5 of everything is both."""
    logits = torch.tensor([0.3, 0.25, 0.15, 0.15, 0.15]).log()
    assert kept_tokens(logits, replace(PLAIN, top_p=0.5)) == {0, 1}
    assert kept_tokens(logits, replace(PLAIN, top_k=2, top_p=0.5)) == {0}


def test_the_logits_handed_in_are_left_alone() -> None:
    logits = make_logits()[None]
    before = logits.clone()
    adjust_logits(logits, SETTINGS["top-k, top-p and min-p"], None)
    sample(logits, SETTINGS["repetition penalty"], torch.tensor([0]), seen=make_seen())
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -2),
        ("top_p", 1.01),
        ("top_p", -0.1),
        ("top_p", math.nan),
        ("min_p", 2.0),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.nan),
        ("seed", -1),
        ("seed", 2**63),
    ],
)
def test_settings_without_a_meaning_are_refused_by_name(setting: str, value: float) -> None:
    with pytest.raises(UserError, match=f"(?i){setting.replace('_', '.')}.*{value}"):
        SamplingConfig(**{setting: value})  # type: ignore[arg-type]


# Seeds


def test_the_same_seed_gives_the_same_draws_and_another_seed_others() -> None:
    logits = make_logits()
    first = draw(logits, PLAIN, 50)
    assert torch.equal(first, draw(logits, PLAIN, 50))
    assert not torch.equal(first, draw(logits, replace(PLAIN, seed=PLAIN.seed + 1), 50))


def test_a_draw_depends_on_its_position_and_not_on_earlier_draws() -> None:
    logits = make_logits()
    draws = draw(logits, PLAIN, 30)
    torch.rand(7)  # noise doesn't come from the global generator either
    assert draw_at(29, logits[None], PLAIN) == draws[29].tolist()
    assert draws.unique().numel() > 5


@pytest.mark.parametrize("pair", ["rows", "positions", "seeds"])
def test_noise_is_independent_across(pair: str) -> None:
    """Joint counts of two draws from the same four-way distribution, over 20,000 pairs."""
    logits = torch.tensor([1.0, 0.5, 0.0, -1.0])
    if pair == "seeds":
        draws = [draw(logits, replace(PLAIN, seed=seed), 40, batch_size=500) for seed in (1, 2)]
        first, second = (tokens.flatten() for tokens in draws)
    else:
        draws_by_row = draw(logits, PLAIN, 40, batch_size=1000)
        if pair == "positions":
            draws_by_row = draws_by_row.T
        first, second = draws_by_row[:, 0::2].flatten(), draws_by_row[:, 1::2].flatten()
    p = target_distribution(logits.tolist(), PLAIN)
    counts = torch.bincount(first * 4 + second, minlength=16).tolist()
    statistic, degrees = chi_square(counts, [a * b for a in p for b in p])
    assert statistic < chi_square_limit(degrees)


def test_a_row_of_a_batch_can_be_drawn_again_alone() -> None:
    logits = make_logits()
    together = draw(logits, PLAIN, 20, batch_size=4)
    position = torch.tensor([13])
    alone = sample(logits[None], PLAIN, position, rows=torch.tensor([2]))
    assert int(alone) == int(together[13, 2])


@pytest.mark.parametrize("seed", [0, 1, 2**31 - 1, 2**32, 2**53, 2**63 - 1])
def test_every_seed_draws_from_the_distribution(seed: int) -> None:
    logits = torch.tensor([1.0, 0.5, 0.0, -1.0])
    sampling = replace(PLAIN, seed=seed)
    counts = torch.bincount(draw(logits, sampling, 20, batch_size=1000).flatten(), minlength=4).tolist()
    statistic, degrees = chi_square(counts, target_distribution(logits.tolist(), sampling))
    assert statistic < chi_square_limit(degrees)


# Several positions at once

PROPOSAL_SETTINGS = {
    "greedy": replace(PLAIN, temperature=0.0),
    "greedy, repetition penalty": replace(PLAIN, temperature=0.0, repetition_penalty=1.6),
    "sampled": replace(PLAIN, temperature=0.8),
    "top-k": replace(PLAIN, temperature=0.8, top_k=5),
    "top-p": replace(PLAIN, temperature=0.8, top_p=0.8),
    "min-p": replace(PLAIN, temperature=0.8, min_p=0.1),
    "all filters, repetition penalty": replace(
        PLAIN, temperature=0.8, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.6
    ),
}
SAMPLE, POSITION = 3, 29


def make_sampler(sampling: SamplingConfig) -> Sampler:
    return Sampler(sampling, SEEN, V, sample_ids=(SAMPLE,))


def choose_each(sampler: Sampler, rows: Tensor, position: int = POSITION) -> list[int]:
    """What `choose` returns for one row after the other."""
    return [int(sampler.choose(row[None], position + i)) for i, row in enumerate(rows)]


def make_rows(count: int) -> Tensor:
    """Logits of places that resemble each other, so that a text without the penalty repeats itself."""
    return make_logits(seed=5) + 0.3 * make_logits(seed=6, size=count * V).view(count, V)


@pytest.mark.parametrize("n", range(1, 9))
@pytest.mark.parametrize("name", PROPOSAL_SETTINGS)
def test_accept_returns_what_choose_would_one_by_one(name: str, n: int) -> None:
    sampling, rows, following = PROPOSAL_SETTINGS[name], make_rows(n + 1), make_rows(n + 3)[-2:]
    chosen = choose_each(make_sampler(sampling), rows)
    for n_right in range(n + 1):
        drafted = chosen[:n]
        if n_right < n:
            drafted[n_right] = (drafted[n_right] + 1) % V  # those behind it would be right again
        sampler, expected = make_sampler(sampling), make_sampler(sampling)
        values = sampler.accept(rows, POSITION, torch.tensor(drafted))
        assert values == choose_each(expected, rows[: n_right + 1]) == chosen[: n_right + 1]
        # Both remember the same tokens: those that were accepted and the last, and none that was rejected.
        after = POSITION + len(values)
        assert choose_each(sampler, following, after) == choose_each(expected, following, after)


@pytest.mark.parametrize("name", PROPOSAL_SETTINGS)
def test_accept_of_no_proposal_is_choose(name: str) -> None:
    rows = make_rows(1)
    values = make_sampler(PROPOSAL_SETTINGS[name]).accept(rows, POSITION, torch.empty(0, dtype=torch.int64))
    assert values == choose_each(make_sampler(PROPOSAL_SETTINGS[name]), rows)


def test_the_penalty_at_each_place_is_for_the_drafted_tokens_before_it() -> None:
    """From logits that are the same everywhere: the best, then the second best, and so on."""
    logits, sampling = make_logits(), replace(PLAIN, temperature=0.0, repetition_penalty=1e6)
    best = [token for token in logits.argsort(descending=True).tolist() if token not in SEEN][:4]
    assert logits[best[-1]] > 0
    rows = logits.expand(4, V)
    assert make_sampler(sampling).accept(rows, POSITION, torch.tensor(best[:3])) == best
    wrong = [best[1], best[0], best[2]]
    assert make_sampler(sampling).accept(rows, POSITION, torch.tensor(wrong)) == best[:1]


@pytest.mark.parametrize("name", PROPOSAL_SETTINGS)
def test_propose_chooses_what_choose_would_after_the_drafted_tokens(name: str) -> None:
    """So it has the noise of the place, and a draft with the target's logits is always right."""
    sampling, rows = PROPOSAL_SETTINGS[name], make_rows(9)
    chosen = choose_each(make_sampler(sampling), rows)
    sampler = make_sampler(sampling)
    for n in range(9):
        proposed = sampler.propose(rows[n : n + 1], POSITION + n, torch.tensor(chosen[:n], dtype=torch.int64))
        assert proposed.tolist() == chosen[n : n + 1]


@pytest.mark.parametrize("name", PROPOSAL_SETTINGS)
def test_what_was_proposed_is_not_remembered(name: str) -> None:
    sampling, rows = PROPOSAL_SETTINGS[name], make_rows(6)
    sampler = make_sampler(sampling)
    for n in range(6):
        sampler.propose(rows[n : n + 1], POSITION + n, torch.arange(n))
    assert choose_each(sampler, rows) == choose_each(make_sampler(sampling), rows)


def test_proposals_without_the_noise_of_the_place_would_differ() -> None:
    """Else the tests above could not tell it from another's."""
    rows = make_logits().expand(30, V)
    sampler = make_sampler(PROPOSAL_SETTINGS["sampled"])
    none = torch.empty(0, dtype=torch.int64)
    moved = [int(sampler.propose(row[None], POSITION + i + 1, none)) for i, row in enumerate(rows)]
    chosen = choose_each(sampler, rows)
    assert sum(a == b for a, b in zip(moved, chosen, strict=True)) < 15
    assert moved[:-1] == chosen[1:]


# Properties


@st.composite
def logit_rows(draw: st.DrawFn) -> Tensor:
    """Distinct quarter steps: no ties, and sums that stay clear of the threshold's rounding."""
    steps = draw(st.lists(st.integers(-60, 60), min_size=2, max_size=30, unique=True))
    return torch.tensor(steps, dtype=torch.float32) / 4


SAMPLING = st.builds(
    SamplingConfig,
    temperature=st.floats(0.1, 3.0),
    top_k=st.one_of(st.none(), st.integers(-1, 40)),
    top_p=st.floats(0.0, 1.0),
    min_p=st.floats(0.0, 1.0),
)


@settings(deadline=None, max_examples=200)
@given(logit_rows(), SAMPLING)
def test_the_kept_set_is_a_prefix_of_the_sorted_order(logits: Tensor, sampling: SamplingConfig) -> None:
    kept = kept_tokens(logits, sampling)
    order = logits.argsort(descending=True).tolist()
    assert kept == set(order[: len(kept)])
    assert kept


@settings(deadline=None, max_examples=200)
@given(logit_rows(), st.floats(0.0, 0.9999))
def test_top_p_keeps_a_sufficient_and_minimal_set(logits: Tensor, top_p: float) -> None:
    kept = kept_tokens(logits, replace(PLAIN, top_p=top_p))
    kept_p = torch.softmax(logits.double(), dim=-1)[sorted(kept)]
    assert float(kept_p.sum()) > top_p - 1e-6
    assert len(kept) == 1 or float(kept_p.sum() - kept_p.min()) < top_p + 1e-6


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(-8, 8), min_size=2, max_size=30), st.integers(1, 30))
def test_top_k_keeps_all_values_at_least_as_large_as_the_kth(steps: list[int], top_k: int) -> None:
    logits = torch.tensor(steps, dtype=torch.float32) / 2
    kept = kept_tokens(logits, replace(PLAIN, top_k=top_k))
    threshold = sorted(steps, reverse=True)[min(top_k, len(steps)) - 1]
    assert kept == {token for token, step in enumerate(steps) if step >= threshold}


@settings(deadline=None, max_examples=100)
@given(logit_rows(), st.floats(0.0, 1.0))
def test_min_p_keeps_what_is_near_the_most_likely(logits: Tensor, min_p: float) -> None:
    kept = kept_tokens(logits, replace(PLAIN, min_p=min_p))
    ratio = torch.exp(logits.double() - logits.double().max())
    assert all((float(ratio[token]) > min_p * (1 - 1e-5)) for token in kept)
    assert all((float(ratio[token]) < min_p * (1 + 1e-5)) for token in set(range(len(ratio))) - kept)


@settings(deadline=None, max_examples=50)
@given(logit_rows(), SAMPLING, st.integers(0, 2**20))
def test_only_kept_tokens_are_drawn(logits: Tensor, sampling: SamplingConfig, position: int) -> None:
    token = sample(logits[None], sampling, torch.tensor([position]))
    assert token.dtype == torch.int64
    assert int(token) in kept_tokens(logits, sampling)


# The values on a device


NOT_POSITIVE = st.floats(-(2.0**100), 0, width=32, allow_subnormal=False)


def put_on_device(sampling: SamplingConfig) -> SamplingTensors:
    values = SamplingTensors(sampling.kind, "cpu")
    values.load(sampling)
    return values


@settings(deadline=None, max_examples=200)
@given(logit_rows(), SAMPLING, st.floats(0.5, 2.0), st.integers(0, 2**63 - 1), st.integers(0, 2**20))
def test_values_on_the_device_choose_the_same_tokens_to_the_bit(
    logits: Tensor, sampling: SamplingConfig, penalty: float, seed: int, position: int
) -> None:
    sampling = replace(sampling, repetition_penalty=penalty, seed=seed)
    values, seen = put_on_device(sampling), torch.arange(len(logits))[None] % 3 == 0
    assert torch.equal(adjust_logits(logits[None], values, seen), adjust_logits(logits[None], sampling, seen))
    places, rows = torch.tensor([position]), torch.tensor([2])
    expected = sample(logits[None], sampling, places, rows=rows, seen=seen)
    assert torch.equal(choose_tokens(logits[None], values, places, rows, seen), expected)


@pytest.mark.parametrize("digit_bits", [1, 3, 4])
@pytest.mark.parametrize("name", SETTINGS)
def test_values_on_the_device_may_be_of_a_large_vocabulary(
    name: str, digit_bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, sampling = make_logits(size=50_000)[None], SETTINGS[name]
    seen = mark_seen(SEEN, 50_000) if sampling.kind.has_penalty else None
    expected = adjust_logits(logits, sampling, seen)
    monkeypatch.setitem(DIGIT_BITS, "cpu", digit_bits)
    assert torch.equal(adjust_logits(logits, put_on_device(sampling), seen), expected)


@settings(deadline=None, max_examples=200)
@given(st.lists(NOT_POSITIVE, min_size=1, max_size=30), st.integers(1, 40))
def test_a_k_of_the_device_finds_the_kth_largest(values: list[float], k: int) -> None:
    logits = torch.tensor([values])
    expected = find_kth_largest(logits, k)
    assert expected.item() == sorted(values, reverse=True)[min(k, len(values)) - 1]
    assert torch.equal(find_kth_largest(logits, torch.tensor(k)), expected)


@pytest.mark.parametrize("digit_bits", [1, 4])
def test_a_k_of_the_device_counts_what_was_left_out(digit_bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DIGIT_BITS, "cpu", digit_bits)
    logits = torch.tensor([[0.0, -math.inf, -3.0, -0.0, -math.inf]])
    for k, expected in ((1, 0.0), (2, 0.0), (3, -3.0), (4, -math.inf), (9, -math.inf)):
        assert find_kth_largest(logits, torch.tensor(k)).item() == expected


def test_a_filter_that_is_off_is_no_part_of_its_kind() -> None:
    greedy = SamplingConfig(temperature=0.0, top_k=5, top_p=0.5, min_p=0.1)
    assert greedy.kind == SamplingConfig().kind
    assert replace(PLAIN, top_k=-1).kind == replace(PLAIN, top_k=0).kind == PLAIN.kind
    assert len({SETTINGS[name].kind for name in ("plain", "top-k", "top-p", "min-p", "repetition penalty")}) == 5
    assert SETTINGS["cold"].kind == SETTINGS["hot"].kind


# The reference itself


def test_the_reference_knows_textbook_cases() -> None:
    assert top_p_set([0.5, 0.25, 0.25], 0.5) == {0}
    assert top_p_set([0.5, 0.3, 0.2], 0.51) == {0, 1}
    assert top_p_set([0.5, 0.25, 0.25], 0.51) == {0, 1, 2}
    penalized = target_distribution([2.0, -1.0, 0.0], replace(PLAIN, repetition_penalty=2.0), seen=(0, 1))
    assert penalized == pytest.approx(target_distribution([1.0, -2.0, 0.0], PLAIN))
    assert chi_square_limit(10, deviations=1.6449) == pytest.approx(18.307, abs=0.02)  # the 95 % quantile
    assert math.fsum(penalized) == pytest.approx(1)
