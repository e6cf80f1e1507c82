"""Means over the tokens of a text, with the error that comes from there being no more of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gptfast.errors import UserError


@dataclass(frozen=True)
class Estimate:
    """A figure and its standard error, in one unit; the error is None where a single window tells nothing of it."""

    value: float
    standard_error: float | None


def estimate_mean(windows: Sequence[Tensor]) -> Estimate:
    """The mean over all tokens, given as one float64 tensor (tokens,) for each window.

    The tokens of a window share their context, so the windows and not the tokens are taken for independent:

        se = sqrt(W / (W - 1) * sum_w (sum_{t in w} (x_t - mean))^2) / T

    over T tokens in W windows. This is the cluster-robust error of a mean (Liang and Zeger 1986; Miller 2024,
    "Adding Error Bars to Evals") with the usual factor for few clusters. For a difference of two models, give the
    differences token by token: the error is then the paired one.
    """
    count = sum(len(values) for values in windows)
    mean = float(torch.cat(list(windows)).sum()) / count
    if len(windows) == 1:
        return Estimate(mean, None)
    squares = math.fsum(float((values - mean).sum()) ** 2 for values in windows)
    return Estimate(mean, math.sqrt(len(windows) / (len(windows) - 1) * squares) / count)


def exponentiate(estimate: Estimate) -> Estimate:
    """The exponential, with its standard error by the delta method: se(exp(x)) = exp(x) se(x)."""
    try:
        value = math.exp(estimate.value)
    except OverflowError as error:
        raise UserError(
            f"the mean is {estimate.value:.0f} nats per token, whose exponential is too large for a number; "
            "the weights are damaged, or not of this tokenizer"
        ) from error
    return Estimate(value, None if estimate.standard_error is None else value * estimate.standard_error)
