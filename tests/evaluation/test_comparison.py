"""What separates two models: against distributions worked out by hand and against plain formulas on whole texts."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
import torch
from torch import Tensor

from gptfast.errors import UserError
from gptfast.evaluation.comparison import compare_block, compare_models, encode_for_both
from gptfast.evaluation.perplexity import measure_perplexity
from gptfast.evaluation.statistics import Estimate
from gptfast.evaluation.text import Window, plan_windows
from gptfast.session import Session
from gptfast.tokenizer_backends import FastTokenizer
from tests.reference.sessions import PROMPT, load_tiny, random_prompt, tiny_config
from tests.reference.tokenizers import train_byte_level

pytestmark = pytest.mark.usefixtures("tiny_cache")

IDS = random_prompt(400)
WINDOWS = plan_windows(len(IDS), 100, 50)


def log(*probabilities: float) -> Tensor:
    return torch.tensor([probabilities]).log()


# One token


def test_kl_is_that_of_known_distributions() -> None:
    nll, base_nll, kl, agrees = compare_block(log(0.25, 0.75), torch.tensor([1]), log(0.5, 0.5)).flatten().tolist()
    assert nll == pytest.approx(-math.log(0.75), rel=1e-6)
    assert base_nll == pytest.approx(-math.log(0.5), rel=1e-6)
    # KL(base || model), which is not KL(model || base) = 0.131.
    assert kl == pytest.approx(0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75), rel=1e-6)
    assert agrees == 0  # the base has a tie, and takes the lower id


def test_logits_may_be_shifted() -> None:
    logits, base = log(0.1, 0.2, 0.7), log(0.3, 0.3, 0.4)
    expected = compare_block(logits, torch.tensor([0]), base)
    assert torch.allclose(compare_block(logits + 5, torch.tensor([0]), base - 3), expected, atol=1e-6)
    assert expected[3] == 1


def test_padding_of_one_vocabulary_is_left_out_of_kl_and_agreement() -> None:
    """It counts in the padded model's own likelihood, as it does in transformers."""
    padded, base = log(0.1, 0.3, 0.6), log(0.25, 0.75)
    nll, _, kl, agrees = compare_block(padded, torch.tensor([1]), base).flatten().tolist()
    assert nll == pytest.approx(-math.log(0.3), rel=1e-6)
    assert kl == pytest.approx(0, abs=1e-7)
    assert agrees == 1


# Whole texts


def test_a_model_does_not_differ_from_itself(eager: Session, directory: Path) -> None:
    result, comparison = compare_models(eager, load_tiny(directory), IDS, WINDOWS)
    assert comparison.nll_difference_nats_per_token == Estimate(0, 0)
    assert comparison.perplexity_ratio == Estimate(1, 0)
    assert comparison.kl_nats_per_token == Estimate(0, 0)
    assert comparison.top1_agreement == Estimate(1, 0)
    assert comparison.base_perplexity == result.perplexity


@torch.no_grad()
def compute_by_hand(model: Session, base: Session, ids: list[int], windows: list[Window]) -> tuple[float, ...]:
    """Mean difference of log-likelihoods, its paired error, KL and agreement, from softmax in float64."""
    differences, kl, agrees = [], [], []
    vocab_size = tiny_config().vocab_size
    for window in windows:
        targets = torch.tensor(ids[window.first : window.stop])
        p, q = (
            session.runner.score(ids[window.start : window.stop - 1])[window.first - window.start - 1 :].double()
            for session in (model, base)
        )
        own = [(x.exp() / x.exp().sum(-1, keepdim=True)).gather(1, targets[:, None])[:, 0].log() for x in (p, q)]
        differences.append(own[1] - own[0])
        p, q = (x[:, :vocab_size].softmax(-1) for x in (p, q))
        kl.append((q * (q / p).log()).sum(-1))
        agrees.append(p.argmax(-1) == q.argmax(-1))
    every = torch.cat(differences)
    spread = sum(float((each - every.mean()).sum()) ** 2 for each in differences)
    error = math.sqrt(len(windows) / (len(windows) - 1) * spread) / len(every)
    return float(every.mean()), error, float(torch.cat(kl).mean()), float(torch.cat(agrees).double().mean())


def test_another_model_differs_as_the_formulas_say(eager: Session, noisy: Session) -> None:
    result, comparison = compare_models(noisy, eager, IDS, WINDOWS)
    difference, error, kl, agreement = compute_by_hand(noisy, eager, IDS, WINDOWS)
    assert comparison.nll_difference_nats_per_token.value == pytest.approx(difference, rel=1e-6)
    assert comparison.nll_difference_nats_per_token.standard_error == pytest.approx(error, rel=1e-6)
    assert comparison.kl_nats_per_token.value == pytest.approx(kl, rel=1e-6)
    assert comparison.top1_agreement.value == pytest.approx(agreement)
    assert 0 < agreement < 1
    assert result == measure_perplexity(noisy, IDS, WINDOWS)
    base = measure_perplexity(eager, IDS, WINDOWS)
    assert comparison.base_perplexity == base.perplexity
    assert comparison.base_nll_nats_per_token == base.nll_nats_per_token
    assert comparison.perplexity_ratio.value == pytest.approx(result.perplexity.value / base.perplexity.value)


def test_the_paired_error_is_smaller_than_that_of_two_separate_runs(eager: Session, noisy: Session) -> None:
    result, comparison = compare_models(noisy, eager, IDS, WINDOWS)
    paired = comparison.nll_difference_nats_per_token.standard_error
    errors = [result.nll_nats_per_token.standard_error, comparison.base_nll_nats_per_token.standard_error]
    assert paired is not None
    assert None not in errors
    assert paired < math.hypot(*(error for error in errors if error is not None)) / 2


# Tokenizers


def test_the_same_tokenizer_from_two_places_is_the_same(eager: Session, noisy: Session) -> None:
    assert eager.tokenizer is not None
    assert encode_for_both(noisy, eager, PROMPT) == eager.tokenizer.encode(PROMPT)


def test_tokens_that_only_one_has_are_no_difference(eager: Session) -> None:
    library = train_byte_level()
    library.add_tokens([tokenizers.AddedToken("<unused>", special=False)])
    assert encode_for_both(with_tokenizer(eager, library), eager, PROMPT)


def test_another_vocabulary_is_refused_by_its_first_token_that_differs(eager: Session) -> None:
    library = train_byte_level()
    state = library.to_str().replace('"<think>"', '"<thinks>"')
    other = with_tokenizer(eager, tokenizers.Tokenizer.from_str(state))
    with pytest.raises(UserError, match=rf"token {tiny_config().vocab_size - 1} is b'<thinks>' and b'<think>'"):
        encode_for_both(other, eager, PROMPT)


def test_another_way_to_split_is_refused(eager: Session) -> None:
    state = json.loads(train_byte_level().to_str())
    state["model"]["merges"].reverse()
    other = with_tokenizer(eager, tokenizers.Tokenizer.from_str(json.dumps(state)))
    with pytest.raises(UserError, match="split this text differently"):
        encode_for_both(other, eager, PROMPT)


def with_tokenizer(session: Session, library: tokenizers.Tokenizer) -> Session:
    return replace(session, tokenizer=FastTokenizer(library))
