"""HQQ: what it minimizes, and that its numbers are those of the format."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gptfast.errors import UserError
from gptfast.quantization import QuantizedWeight, WeightScheme
from gptfast.rounding import get_code_range, round_to_nearest
from quantize.hqq import NORM, quantize_hqq, shrink
from tests.reference.matrices import matrices

SCHEMES = [WeightScheme(4, group, symmetric) for group in (32, None) for symmetric in (True, False)]
MATRICES = matrices(64, (-8, 4))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def sum_objective(weight: Tensor, rounded: QuantizedWeight) -> Tensor:
    """What HQQ minimizes, of every group, in float64."""
    weight = weight.double()
    terms = weight.square() * (rounded.dequantize().double() - weight).abs() ** NORM
    return terms.view(*rounded.scales.shape, -1).sum(-1)


@pytest.mark.parametrize("scheme", SCHEMES, ids=WeightScheme.describe)
@settings(max_examples=15, deadline=None)
@given(weight=MATRICES)
def test_no_group_is_worse_than_where_it_started(scheme: WeightScheme, weight: Tensor) -> None:
    start, end = (sum_objective(weight, function(weight, scheme)) for function in (round_to_nearest, quantize_hqq))
    assert (end <= start * (1 + 1e-5)).all()


@pytest.mark.parametrize("scheme", SCHEMES, ids=WeightScheme.describe)
@settings(max_examples=15, deadline=None)
@given(weight=MATRICES)
def test_its_numbers_are_those_of_the_format(scheme: WeightScheme, weight: Tensor) -> None:
    rounded = quantize_hqq(weight, scheme)
    least, largest = get_code_range(scheme)
    assert rounded.bits == 4
    assert rounded.mins is None
    assert rounded.scales.equal(rounded.scales.bfloat16().float())
    assert rounded.scales.isfinite().all()
    assert (rounded.scales != 0).all()
    assert least <= int(rounded.codes.min()) <= int(rounded.codes.max()) <= largest
    assert (rounded.zeros is None) == scheme.symmetric
    if rounded.zeros is not None:
        assert rounded.zeros.dtype == torch.int8
        assert least <= int(rounded.zeros.min()) <= int(rounded.zeros.max()) <= largest


@pytest.mark.parametrize("scheme", SCHEMES, ids=WeightScheme.describe)
def test_what_it_minimizes_becomes_less(scheme: WeightScheme) -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    start, end = (sum_objective(weight, function(weight, scheme)) for function in (round_to_nearest, quantize_hqq))
    # A row of 256 leaves less to gain than its groups of 32.
    assert end.sum() < (0.99 if scheme.group_size else 0.998) * start.sum()


def test_a_group_on_the_grid_but_for_some_weights_is_found() -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randint(-8, 8, (64, 64), generator=generator).float()
    weight[:, 0] = -8
    weight[:, 7] += 0.4
    rounded = quantize_hqq(weight, WeightScheme(4, 64))
    exact = (rounded.dequantize() - weight).abs() < 1e-6
    assert exact.float().mean() > 0.95


@given(error=st.floats(-2, 2), stiffness=st.floats(1, 100))
def test_shrinking_keeps_the_sign_and_makes_errors_smaller(error: float, stiffness: float) -> None:
    shrunk = float(shrink(torch.tensor([error]), stiffness))
    assert abs(shrunk) <= abs(error)
    assert shrunk * error >= 0


def test_shrinking_is_the_generalized_soft_threshold() -> None:
    errors = torch.tensor([-1.0, -0.05, 0.0, 0.5])
    expected = [-(1 - 1 / 10), 0.0, 0.0, 0.5 - 0.5 ** (NORM - 1) / 10]
    torch.testing.assert_close(shrink(errors, 10.0), torch.tensor(expected))


def test_what_rounding_refuses_is_refused() -> None:
    with pytest.raises(UserError, match="x has 90 inputs, which groups of 64 do not divide"):
        quantize_hqq(torch.ones(2, 90), WeightScheme(4, 64), name="x")
    with pytest.raises(UserError, match="x has weights that are not finite"):
        quantize_hqq(torch.full((2, 64), float("nan")), WeightScheme(4, 64), name="x")
