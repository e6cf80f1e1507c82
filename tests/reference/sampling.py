"""The distribution that sampling must draw from, in plain Python floats (float64): lists in, lists out."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from gptfast.config import SamplingConfig


def target_distribution(logits: Sequence[float], sampling: SamplingConfig, seen: Collection[int] = ()) -> list[float]:
    """The probability of every token; a token outside the kept set has exactly 0.

    Penalty (Keskar et al. 2019, section 4.1, with the sign rule that every implementation follows), then
    temperature, top-k (Fan et al. 2018), top-p (Holtzman et al. 2020) and min-p (Nguyen et al. 2024), each on
    the renormalized result of the one before.
    """
    scores = penalize(logits, sampling.repetition_penalty, seen)
    if sampling.temperature == 0:
        best = scores.index(max(scores))
        return [float(token == best) for token in range(len(scores))]
    probabilities = softmax([score / sampling.temperature for score in scores])
    probabilities = keep(probabilities, top_k_set(probabilities, sampling.top_k))
    probabilities = keep(probabilities, top_p_set(probabilities, sampling.top_p))
    return keep(probabilities, min_p_set(probabilities, sampling.min_p))


def penalize(logits: Sequence[float], penalty: float, seen: Collection[int]) -> list[float]:
    """Divide the positive and multiply the negative logits of the tokens in `seen`."""

    def adjust(token: int, logit: float) -> float:
        if token not in seen:
            return logit
        return logit / penalty if logit > 0 else logit * penalty

    return [adjust(token, logit) for token, logit in enumerate(logits)]


def softmax(scores: Sequence[float]) -> list[float]:
    """exp(s) / sum(exp(s))."""
    highest = max(scores)
    exponentials = [math.exp(score - highest) for score in scores]
    total = math.fsum(exponentials)
    return [exponential / total for exponential in exponentials]


def keep(probabilities: Sequence[float], tokens: Collection[int]) -> list[float]:
    """Zero all tokens but `tokens` and renormalize."""
    total = math.fsum(probabilities[token] for token in tokens)
    return [p / total if token in tokens else 0.0 for token, p in enumerate(probabilities)]


def top_k_set(probabilities: Sequence[float], top_k: int | None) -> set[int]:
    """Every token that is at least as likely as the k-th most likely one: more than k if there are ties."""
    if top_k is None or top_k < 1 or top_k >= len(probabilities):
        return set(range(len(probabilities)))
    threshold = sorted(probabilities, reverse=True)[top_k - 1]
    return {token for token, p in enumerate(probabilities) if p >= threshold}


def top_p_set(probabilities: Sequence[float], top_p: float) -> set[int]:
    """The fewest most likely tokens that together reach `top_p`, at least one, and all that tie with the last."""
    if top_p >= 1:
        return set(range(len(probabilities)))
    ordered = sorted(probabilities, reverse=True)
    count = 1
    while math.fsum(ordered[:count]) < top_p:
        count += 1
    return {token for token, p in enumerate(probabilities) if p >= ordered[count - 1]}


def min_p_set(probabilities: Sequence[float], min_p: float) -> set[int]:
    """Every token that is at least `min_p` times as likely as the most likely one."""
    threshold = min_p * max(probabilities)
    return {token for token, p in enumerate(probabilities) if p >= threshold}


def chi_square(counts: Sequence[int], probabilities: Sequence[float]) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom; cells that expect fewer than 5 draws are pooled."""
    draws = sum(counts)
    cells: list[tuple[float, float]] = []
    pooled_count, pooled_expected = 0.0, 0.0
    for count, probability in zip(counts, probabilities, strict=True):
        expected = probability * draws
        if expected >= 5:
            cells.append((count, expected))
        else:
            pooled_count, pooled_expected = pooled_count + count, pooled_expected + expected
    if pooled_expected > 0:
        cells.append((pooled_count, pooled_expected))
    statistic = math.fsum((count - expected) ** 2 / expected for count, expected in cells)
    return statistic, len(cells) - 1


def chi_square_limit(degrees: int, deviations: float = 4.5) -> float:
    """What a correct sampler exceeds with the chance of `deviations` sigma (4.5: 3e-6).

    Wilson and Hilferty 1931: the cube root of chi-square over its degrees of freedom is nearly normal.
    """
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + deviations * math.sqrt(spread)) ** 3
