"""GPTQ (Frantar et al. 2022): rounding that makes later weights of a row compensate for the errors of earlier ones.

What is minimized is the error of the layer's output on a calibration text, tr(D H D^T), where D is the change of the
weights and H the second moment of the layer's inputs. Inputs are rounded in the order of falling H[k, k] (act-order),
but belong to the groups of their own order, whose scales are chosen before ("static groups"): so the result looks
like that of any other rounding.

Shapes: N out_features, K in_features, G groups of a row, T tokens, R rows of a slice, P inputs of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gptfast.errors import UserError
from gptfast.quantization import QuantizedWeight, WeightScheme, slice_rows
from gptfast.rounding import SLICE_WEIGHTS, RoundedRows, center_codes, choose_ranges, round_slices

BLOCK_INPUTS = 128
"""Inputs whose errors reach the inputs after them at once, as one product of matrices."""
COMPENSATED_WEIGHTS = 2**24
"""Weights that are rounded at once; rows do not depend on each other."""
DAMPING = 0.01
"""Of the mean diagonal that is added to the diagonal of H, as in the paper."""
MAX_DAMPING = 1.0
"""More than this is not tried where H stays singular."""


@dataclass(frozen=True)
class InputStatistics:
    """What GPTQ knows of a layer's inputs.

    Attributes:
        order: (K,) int64, the inputs in the order in which they are rounded.
        factor: (K, K) float32 in that order, upper triangular; factor^T factor is the inverse of the damped H.
        importance: (K,) float32 in the inputs' own order, the diagonal of the damped H over its mean.
    """

    order: Tensor
    factor: Tensor
    importance: Tensor


class Hessian:
    """The second moment (K, K) float32 of the inputs of a layer, gathered from batches of them."""

    def __init__(self, columns: int) -> None:
        self._sum = torch.zeros(columns, columns)
        self._tokens = 0

    def add(self, inputs: Tensor) -> None:
        """Take in (..., K) float32."""
        rows = inputs.reshape(-1, inputs.shape[-1])
        self._sum.addmm_(rows.T, rows)
        self._tokens += len(rows)

    def compute(self) -> Tensor:
        """The mean over all tokens (K, K)."""
        return self._sum / max(1, self._tokens)


def quantize_gptq(
    weight: Tensor, hessian: Tensor, scheme: WeightScheme, *, name: str = "the matrix"
) -> QuantizedWeight:
    """Round a matrix (N, K) of any floating dtype by the second moment (K, K) float32 of its inputs.

    Raises UserError, which calls the matrix `name`, as `gptfast.rounding.round_to_nearest` and `factorize` do.
    """
    return compensate(weight, factorize(hessian, name=name), scheme, name=name)


def factorize(hessian: Tensor, *, name: str = "the matrix") -> InputStatistics:
    """Prepare the second moment (K, K) float32 of the inputs that one matrix or several have in common.

    An input that is always zero is damped like the others and then rounded to nearest. The factor is computed in
    float64, three matrices (K, K) of it at once. Raises UserError, which says that the inputs are those of `name`,
    if the moment is not finite or has no Cholesky factor even when damped by `MAX_DAMPING`.
    """
    moment = hessian.double()
    diagonal = moment.diagonal().clone()
    mean = float(diagonal.mean())
    if not torch.isfinite(moment.sum()):
        raise UserError(f"the inputs of {name} are not finite on the calibration text; the checkpoint is damaged")
    if mean == 0:
        moment, mean = torch.eye(len(moment), dtype=torch.float64), 1.0
        diagonal = moment.diagonal().clone()
    order = diagonal.argsort(descending=True, stable=True)
    moment = moment[order[:, None], order]
    damping = DAMPING
    while damping <= MAX_DAMPING:
        moment.diagonal().copy_(diagonal[order] + damping * mean)
        upper = factorize_inverse(moment)
        if upper is not None:
            damped = diagonal + damping * mean
            return InputStatistics(order, upper.float(), (damped / damped.mean()).float())
        damping *= 10
    raise UserError(f"the inputs of {name} depend on each other too much; give a longer --calibration text")


def factorize_inverse(moment: Tensor) -> Tensor | None:
    """The upper Cholesky factor (K, K) of the inverse of a moment (K, K) float64; None where there is none."""
    lower, failed = torch.linalg.cholesky_ex(moment)
    if failed:
        return None
    inverse = torch.cholesky_inverse(lower)
    del lower  # else it would stand beside the factor
    upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
    return None if failed else upper


def compensate(
    weight: Tensor, inputs: InputStatistics, scheme: WeightScheme, *, name: str = "the matrix"
) -> QuantizedWeight:
    """Round a matrix (N, K) of any floating dtype whose inputs have these statistics; see `quantize_gptq`."""

    def round_rows(values: Tensor) -> RoundedRows:
        parts = [values[part] for part in slice_rows(values.shape, SLICE_WEIGHTS["cpu"])]
        ranges = [choose_ranges(part, scheme, inputs.importance, name=name) for part in parts]
        scales, zeros = (torch.cat(each) for each in zip(*ranges, strict=True))
        return compensate_rows(values, scales, zeros, inputs, scheme), scales, zeros

    return round_slices(weight, scheme, round_rows, slice_weights=COMPENSATED_WEIGHTS, name=name)


def compensate_rows(
    values: Tensor, scales: Tensor, zeros: Tensor, inputs: InputStatistics, scheme: WeightScheme
) -> Tensor:
    """Codes (R, K) int8 of some rows (R, K) float32 with scales and zeros (R, G)."""
    columns, group_size = values.shape[1], values.shape[1] // scales.shape[1]
    # Inputs as rows: what is done to one of them at a time then runs along contiguous memory.
    remaining = values.T[inputs.order]
    scales, zeros = scales.T.contiguous(), zeros.T.float()
    codes = torch.empty(columns, len(values), dtype=torch.int8)
    order = inputs.order.tolist()
    for start in range(0, columns, BLOCK_INPUTS):
        stop = min(start + BLOCK_INPUTS, columns)
        block, factor = remaining[start:stop], inputs.factor[start:stop]
        errors = torch.empty_like(block)
        for i, column in enumerate(order[start:stop]):
            scale, zero = scales[column // group_size], zeros[column // group_size]
            centered = center_codes(block[i], scale, zero, scheme)
            codes[column] = centered + zero
            torch.div(block[i] - centered * scale, factor[i, start + i], out=errors[i])
            block[i + 1 :].addr_(factor[i, start + i + 1 : stop], errors[i], alpha=-1)
        remaining[stop:].addmm_(factor[:, stop:].T, errors, alpha=-1)
    return codes.T.contiguous()
