"""HQQ (Badri and Shaji 2023): scales and zeros that leave most weights of a group almost exact and few far off.

What is minimized is the sum of w^2 |w - w'|^p with p = 0.7. The paper has no w^2; with it the few that are far off are
not the large weights, which matter most (see `gptfast.rounding.choose_ranges`). An auxiliary error e splits it in
half-quadratic form into two easy steps: e, which takes what is far off upon itself, and the scale and the zero that fit
the rest, w - e.

The two HQQ functions of torchao do not fit the format: the zero of one is no integer, the other minimizes squares, and
neither rounds the scale that is stored before it chooses codes.

Shapes: N out_features, K in_features, R rows of a slice, C inputs of a group, M groups of a slice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gptfast.quantization import QuantizedWeight, WeightScheme
from gptfast.rounding import (
    RoundedRows,
    center_codes,
    choose_codes,
    choose_ranges,
    get_code_range,
    round_slices,
    sum_products,
)

NORM = 0.7
"""The p of the paper."""
STIFFNESS = 10.0
"""How strongly e is held to the error, in scales, at first: the paper's beta."""
STIFFENING = 1.01
"""What that is multiplied with after every step."""
STEPS = 20


def quantize_hqq(weight: Tensor, scheme: WeightScheme, *, name: str = "the matrix") -> QuantizedWeight:
    """Round a matrix (N, K) of any floating dtype; it starts from `gptfast.rounding.choose_ranges`.

    No group has more of what is minimized than at the start. Zeros are integers in every step. Memory and errors are
    those of `gptfast.rounding.round_to_nearest`. 100 M weights take 19 s (one core of a Zen 5, torch 2.13, 2026-11-30).
    """

    def round_rows(values: Tensor) -> RoundedRows:
        scales, zeros = choose_ranges(values, scheme, name=name)
        groups = values.view(scales.numel(), -1).t().contiguous()
        best_scales, best_zeros = optimize_ranges(groups, scales.flatten(), zeros.flatten().float(), scheme)
        scales, zeros = best_scales.view(scales.shape), best_zeros.view(scales.shape).to(torch.int8)
        return choose_codes(values, scales, zeros, scheme), scales, zeros

    return round_slices(weight, scheme, round_rows, name=name)


def optimize_ranges(values: Tensor, scales: Tensor, zeros: Tensor, scheme: WeightScheme) -> tuple[Tensor, Tensor]:
    """The scales and zeros (M,) with the least of what is minimized that the steps come by, for values (C, M)."""
    costs = values.square()
    best_scales, best_zeros, least = scales, zeros, torch.full_like(scales, torch.inf)
    stiffness = STIFFNESS
    for _ in range(STEPS):
        codes = center_codes(values, scales, zeros, scheme)
        errors = values - codes * scales
        total = (costs * errors.abs() ** NORM).sum(0)
        better = total < least
        least = torch.where(better, total, least)
        best_scales, best_zeros = torch.where(better, scales, best_scales), torch.where(better, zeros, best_zeros)
        rest = values - shrink(errors / scales, stiffness) * scales
        scales, zeros = fit_ranges(rest, costs, codes, scales, zeros, scheme)
        stiffness *= STIFFENING
    return best_scales, best_zeros


def shrink(errors: Tensor, stiffness: float) -> Tensor:
    """The e that is nearest to least in |e|^p + stiffness / 2 (errors - e)^2: the generalized soft threshold.

    Chartrand and Yin 2016; what is below the threshold becomes 0.
    """
    size = errors.abs()
    return errors.sign() * (size - size.clamp(min=1e-6) ** (NORM - 1) / stiffness).clamp(min=0)


def fit_ranges(
    values: Tensor, costs: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor, scheme: WeightScheme
) -> tuple[Tensor, Tensor]:
    """The scales, then the integer zeros, that fit codes less their zero (C, M) to the values best."""
    product, square = sum_products(values, costs, codes)
    fitted = torch.where((square > 0) & (product > 0), product / square, scales)
    scales = torch.where(fitted == 0, scales, fitted).bfloat16().float()
    if scheme.symmetric:
        return scales, zeros
    total = costs.sum(0)
    shift = (costs * (codes - values / scales)).sum(0) / torch.where(total > 0, total, 1)
    return scales, (zeros + shift).round().clamp(*get_code_range(scheme))
