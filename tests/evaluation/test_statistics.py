"""Standard errors against numbers worked out by hand and against the double sum that defines them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gptfast.errors import UserError
from gptfast.evaluation.statistics import Estimate, estimate_mean, exponentiate


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def double_sum(windows: list[list[float]]) -> float:
    """The clustered error by its definition: covariances of all pairs of tokens within a window."""
    values = [x for window in windows for x in window]
    mean = math.fsum(values) / len(values)
    pairs = math.fsum((x - mean) * (y - mean) for window in windows for x in window for y in window)
    return math.sqrt(len(windows) / (len(windows) - 1) * pairs) / len(values)


def test_windows_of_one_token_give_the_textbook_error() -> None:
    estimate = estimate_mean([tensor(1), tensor(2), tensor(3), tensor(6)])
    # The deviations -2, -1, 0 and 3 have the sample variance 14/3, over 4 tokens.
    assert estimate.value == 3
    assert estimate.standard_error == pytest.approx(math.sqrt(14 / 3 / 4))


def test_tokens_of_a_window_count_as_one_observation() -> None:
    estimate = estimate_mean([tensor(1, 1, 1), tensor(3, 3, 3)])
    # Two windows with the means 1 and 3: the variance 2, over 2 windows.
    assert estimate.value == 2
    assert estimate.standard_error == pytest.approx(1)


def test_windows_of_unequal_length_weigh_by_their_tokens() -> None:
    estimate = estimate_mean([tensor(1, 2), tensor(6)])
    # Mean 3; the windows deviate by -3 and 3 in all: sqrt(2 * 18) / 3.
    assert estimate.value == 3
    assert estimate.standard_error == pytest.approx(2)


def test_the_error_is_the_double_sum_over_pairs() -> None:
    generator = torch.Generator().manual_seed(0)
    windows = [torch.rand(size, dtype=torch.float64, generator=generator) * 5 for size in (7, 12, 1, 30, 12)]
    estimate = estimate_mean(windows)
    assert estimate.standard_error == pytest.approx(double_sum([w.tolist() for w in windows]), rel=1e-12)


def test_one_window_has_no_error() -> None:
    assert estimate_mean([tensor(1, 2, 3)]) == Estimate(2, None)


def test_the_exponential_has_the_error_of_the_delta_method() -> None:
    assert exponentiate(Estimate(math.log(8), 0.25)) == Estimate(pytest.approx(8), pytest.approx(2))
    assert exponentiate(Estimate(0, None)) == Estimate(1, None)


def test_an_exponential_that_is_too_large_is_refused() -> None:
    with pytest.raises(UserError, match="800 nats per token"):
        exponentiate(Estimate(800.0, 1.0))
