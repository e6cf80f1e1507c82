"""Matrices to be rounded, for hypothesis."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor


@st.composite
def matrices(draw: st.DrawFn, columns: int, magnitudes: tuple[int, int]) -> Tensor:
    """Some rows of so many inputs: Gaussian, shifted, light- or heavy-tailed, with a row of zeros or without.

    They are of any magnitude between these two powers of ten.
    """
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    weight = torch.randn(draw(st.integers(1, 5)), columns, generator=generator)
    weight = weight.sign() * weight.abs() ** draw(st.sampled_from([0.0, 0.5, 1.0, 3.0]))
    weight = (weight + draw(st.sampled_from([0.0, 0.5, -3.0]))) * 10.0 ** draw(st.integers(*magnitudes))
    if draw(st.booleans()):
        weight[0] = 0
    return weight
