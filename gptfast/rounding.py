"""From a matrix of floats to smaller numbers: every group's scale and zero, and each weight's nearest code.

Scales of integers are rounded to bfloat16 before the codes are chosen, as checkpoints store them in two bytes.

Shapes: N out_features, K in_features, C inputs of a group, G = K / C groups of a row, R rows of a slice,
M = R * G groups of a slice.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gptfast.errors import UserError
from gptfast.quantization import QuantizedWeight, WeightScheme, slice_rows

SLICE_WEIGHTS = {"cpu": 2**18, "cuda": 2**23}
"""Weights that are rounded at once: on a CPU what its caches hold, on CUDA what keeps it busy."""
RoundedRows = tuple[Tensor, Tensor, Tensor]
"""Codes (R, K) of the scheme's dtype, scales (R, G) float32 and zeros (R, G) int8, all 0 if symmetric."""
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""The scale of a group of zeros."""
LARGEST_FLOAT8 = torch.finfo(torch.float8_e4m3fn).max
"""448."""

EXTREME_CODES = torch.linspace(5, 9.5, 12).tolist()
"""Symmetric candidates: the code that the largest magnitude of a group would have if there were enough of them."""
RANGE_CODES = torch.linspace(13, 17, 8).tolist()
"""Asymmetric candidates: the steps that the range of a group would have.

Three times as many of either, over more than this, lower the error by 0.2 % (SmolLM2-135M, groups of 64).
"""


def round_to_nearest(weight: Tensor, scheme: WeightScheme, *, name: str = "the matrix") -> QuantizedWeight:
    """Round a matrix (N, K) of any floating dtype; the result lies on its device.

    Of 8 bits a group's range is that of its weights; of 4 bits it is searched for, see `choose_ranges`. Floats of 8
    bits are rounded as torch does, see `round_to_float8`. Beside the matrix and the result this takes less than 32 MB
    on a CPU and 512 MB on CUDA. 100 M weights take 4 s at 4 bits, 0.2 s at 8 and 0.9 s as floats (one core of
    a Zen 5, torch 2.13, 2026-11-30, floats a day later).

    Raises UserError, which calls the matrix `name`, if the groups do not divide K or a weight is not finite.
    """

    def round_rows(values: Tensor) -> RoundedRows:
        if scheme.is_float:
            return round_to_float8(values, name=name)
        scales, zeros = choose_ranges(values, scheme, name=name)
        return choose_codes(values, scales, zeros, scheme), scales, zeros

    return round_slices(weight, scheme, round_rows, name=name)


def round_slices(
    weight: Tensor,
    scheme: WeightScheme,
    round_rows: Callable[[Tensor], RoundedRows],
    *,
    slice_weights: int | None = None,
    name: str,
) -> QuantizedWeight:
    """Round a matrix (N, K) by what `round_rows` makes of slices (R, K) of it in float32.

    A slice has at most `slice_weights` weights, by default those of `SLICE_WEIGHTS`, or one row. Raises UserError,
    which calls the matrix `name`, if the groups do not divide K.
    """
    rows, columns = weight.shape
    groups = count_groups(columns, scheme, name)
    codes = torch.empty(rows, columns, dtype=scheme.dtype, device=weight.device)
    scales = torch.empty(rows, groups, device=weight.device)
    zeros = torch.empty(rows, groups, dtype=torch.int8, device=weight.device)
    for part in slice_rows(weight.shape, slice_weights or SLICE_WEIGHTS[weight.device.type]):
        codes[part], scales[part], zeros[part] = round_rows(weight[part].float().contiguous())
    return QuantizedWeight(codes, scales, scheme.bits, None if scheme.symmetric else zeros)


def count_groups(columns: int, scheme: WeightScheme, name: str) -> int:
    """The groups of a row of that many inputs; raises UserError unless they divide it."""
    group_size = scheme.get_group_size(columns)
    if columns % group_size:
        raise UserError(
            f"{name} has {columns} inputs, which groups of {group_size} do not divide; "
            "use another group size, or 8 bits with one scale per channel"
        )
    return columns // group_size


def get_code_range(scheme: WeightScheme) -> tuple[int, int]:
    """The least and the largest code."""
    if scheme.bits == 4 and not scheme.symmetric:
        return 0, 15
    return -(2 ** (scheme.bits - 1)), 2 ** (scheme.bits - 1) - 1


def choose_ranges(
    values: Tensor, scheme: WeightScheme, importance: Tensor | None = None, *, name: str = "the matrix"
) -> tuple[Tensor, Tensor]:
    """Scales (R, G) float32 and zeros (R, G) int8, all 0 if symmetric, for some rows (R, K) float32.

    Of 8 bits the codes span what lies in the group. Of 4 bits they span the range, among a few candidates, that
    leaves the least sum of |w| (w - w')^2, with each term times the `importance` (K,) of its input. It is never more
    than that of the group's whole range. A symmetric scale may be negative: there are more codes below zero than
    above, so the sign says on which side.

    Without |w| the large weights, which matter most, are cut off: the perplexity of SmolLM2-135M with asymmetric
    groups of 64 is then higher than with whole ranges. llama.cpp weighs much the same for its K-quants.

    Raises UserError, which calls the matrix `name`, if a weight is not finite.
    """
    rows, columns = values.shape
    group_size = scheme.get_group_size(columns)
    scales, zeros = span_range(values, group_size, scheme)
    check_scales(scales, name)
    if scheme.bits == 4:
        # One group a column: every operation then runs along contiguous memory.
        groups = values.view(-1, group_size).t().contiguous()
        costs = groups.abs()
        if importance is not None:
            costs *= importance.view(-1, group_size).t().repeat(1, rows)
        scales, zeros = search_ranges(groups, costs, scales.flatten(), zeros.flatten(), scheme)
    return scales.view(rows, -1), zeros.view(rows, -1).to(torch.int8)


def round_to_float8(values: Tensor, *, name: str = "the matrix") -> RoundedRows:
    """Some rows (R, K) float32 as floats of 8 bits, to the nearest or, of two as near, the even one.

    The largest magnitude of a row becomes 448, the largest there is. A scale keeps its 32 bits: there is one for a
    whole row, and readers multiply in the dtype that they find it in. Raises UserError, which calls the matrix
    `name`, if a weight is not finite.
    """
    scales = (values.abs().amax(1, keepdim=True) / LARGEST_FLOAT8).clamp(min=SMALLEST_SCALE)
    check_scales(scales, name)
    return (values / scales).to(torch.float8_e4m3fn), scales, torch.zeros_like(scales, dtype=torch.int8)


def check_scales(scales: Tensor, name: str) -> None:
    """Raise UserError, which calls the matrix `name`, if the weights are not finite that these scales are for."""
    if not torch.isfinite(scales).all():
        raise UserError(f"{name} has weights that are not finite; the checkpoint is damaged")


def choose_codes(values: Tensor, scales: Tensor, zeros: Tensor, scheme: WeightScheme) -> Tensor:
    """The nearest codes (R, K) int8 of some rows (R, K) float32 with scales and zeros (R, G)."""
    block = (1, values.shape[1] // scales.shape[1])
    least, largest = get_code_range(scheme)
    codes: Tensor = import_primitives().quantize_affine(values, block, scales, zeros, torch.int8, least, largest)
    return codes


def span_range(values: Tensor, group_size: int, scheme: WeightScheme) -> tuple[Tensor, Tensor]:
    """Scales and zeros (R, G), both float32, with which no weight is further than half a scale from its code.

    The scale is rounded up to bfloat16, as rounding down would cut the ends off, at 8 bits by half a step.
    """
    primitives = import_primitives()
    least, largest = get_code_range(scheme)
    kinds = primitives.MappingType
    # Of 8 bits neither end is cut off: the scale is that of the end that needs the larger one. Of 4 bits the scale only
    # starts the search; it is the largest magnitude over 7.5, from which `list_candidates` computes that magnitude.
    symmetric_kind = kinds.SYMMETRIC if scheme.bits == 4 else kinds.SYMMETRIC_NO_CLIPPING_ERR
    kind = symmetric_kind if scheme.symmetric else kinds.ASYMMETRIC
    scales, zeros = primitives.choose_qparams_affine(
        values, kind, (1, group_size), torch.int8, least, largest, eps=SMALLEST_SCALE, keepdim=True
    )
    scales = round_up_to_bfloat16(scales)
    if not scheme.symmetric:
        # Its own zero belongs to the scale before it was rounded, and would be off by up to two steps at 8 bits.
        minimum = values.view(*scales.shape, group_size).amin(-1).clamp(max=0)
        zeros = (least - (minimum / scales).round()).clamp(least, largest)
    return scales, zeros.float()


def search_ranges(
    values: Tensor, costs: Tensor, scales: Tensor, zeros: Tensor, scheme: WeightScheme
) -> tuple[Tensor, Tensor]:
    """Scales and zeros (M,) of 4 bits with a lower sum of costs than the given ones, or those.

    `costs` (C, M) are those of a squared error of 1 in the `values` (C, M). A candidate is judged by what is left with
    the scale that is best for its codes c, which is <v, c> / <c, c> with <v, c> = sum(cost v c) for values v; what is
    left is then <v, v> - <v, c>^2 / <c, c>.
    """
    best_scales, best_zeros, best_gain = scales, zeros, torch.zeros_like(scales)
    for candidate_scales, candidate_zeros in list_candidates(values, scales, scheme):
        fitted, gain = fit_scales(values, costs, candidate_scales, candidate_zeros, scheme)
        better = gain > best_gain
        best_gain = torch.where(better, gain, best_gain)
        best_scales = torch.where(better, fitted, best_scales)
        best_zeros = torch.where(better, candidate_zeros, best_zeros)
    best_scales, _ = fit_scales(values, costs, best_scales, best_zeros, scheme)
    best_scales = best_scales.bfloat16().float()
    given = sum_costs(values, costs, scales, zeros, scheme)
    better = sum_costs(values, costs, best_scales, best_zeros, scheme) < given
    return torch.where(better, best_scales, scales), torch.where(better, best_zeros, zeros)


def list_candidates(values: Tensor, scales: Tensor, scheme: WeightScheme) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of scales and zeros (M,) to try for values (C, M) whose whole range the given scales span."""
    least, largest = get_code_range(scheme)
    steps = largest - least
    low, high = values.amin(0), values.amax(0)
    if scheme.symmetric:
        signed = torch.where(high > -low, -scales, scales) * (steps / 2)
        zeros = torch.zeros_like(scales)
        for code in EXTREME_CODES:
            yield signed / code, zeros
            yield -signed / code, zeros
        return
    middle = (low.clamp(max=0) + high.clamp(min=0)) / 2
    for codes in RANGE_CODES:
        candidate = scales * (steps / codes)
        zeros = (least + largest) / 2 - middle / candidate
        yield candidate, zeros.floor().clamp(least, largest)
        yield candidate, zeros.ceil().clamp(least, largest)


def fit_scales(
    values: Tensor, costs: Tensor, scales: Tensor, zeros: Tensor, scheme: WeightScheme
) -> tuple[Tensor, Tensor]:
    """The scales that are best for the codes that the given ones lead to, and what they spare of <v, v>; (M,)."""
    codes = center_codes(values, scales, zeros, scheme)
    product, square = sum_products(values, costs, codes)
    fitted = torch.where(square > 0, product / square, scales)
    return fitted, product * fitted


def sum_products(values: Tensor, costs: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """<v, c> and <c, c>, see `search_ranges`, of values v and codes c less their zero (C, M); (M,)."""
    weighted = codes * costs
    return (weighted * values).sum(0), (weighted * codes).sum(0)


def sum_costs(values: Tensor, costs: Tensor, scales: Tensor, zeros: Tensor, scheme: WeightScheme) -> Tensor:
    """What the squared errors of every group cost (M,)."""
    errors = center_codes(values, scales, zeros, scheme) * scales - values
    return (errors.square() * costs).sum(0)


def center_codes(values: Tensor, scales: Tensor, zeros: Tensor, scheme: WeightScheme) -> Tensor:
    """Codes less their zero, as floats (C, M): what a scale is multiplied with."""
    least, largest = get_code_range(scheme)
    return (values * (1 / scales)).round_().maximum(least - zeros).minimum(largest - zeros)


def round_up_to_bfloat16(scales: Tensor) -> Tensor:
    """The least bfloat16 values that are not below the positive float32 ones, still in float32; NaN stays NaN."""
    rounded = ((scales.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)
    return torch.where(torch.isfinite(scales), rounded, scales)


@functools.cache
def import_primitives() -> Any:
    """The affine primitives of torchao, without the lines that its import logs of libraries that it can do without."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        return importlib.import_module("torchao.quantization.quant_primitives")
    finally:
        logging.disable(disabled)
