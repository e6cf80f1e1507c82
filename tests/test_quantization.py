from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from gptfast.quantization import FLOAT8, join_rows, slice_rows
from gptfast.rounding import round_to_nearest


@given(
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple),
    elements=st.integers(1, 2000),
)
def test_slices_of_rows_follow_each_other_and_are_as_large_as_they_may_be(
    shape: tuple[int, ...], elements: int
) -> None:
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    parts = [tensor[rows] for rows in slice_rows(shape, elements)]
    assert torch.cat(parts).equal(tensor)
    per_row = tensor[0].numel()
    assert all(part.numel() <= max(elements, per_row) for part in parts)
    assert all(part.numel() + per_row > elements for part in parts[:-1])


def test_rows_of_floats_are_taken_and_joined() -> None:
    weight = torch.randn(6, 33, generator=torch.Generator().manual_seed(0))
    rounded = round_to_nearest(weight, FLOAT8)
    joined = join_rows([rounded.select_rows(slice(0, 2)), rounded.select_rows(slice(2, 6))])
    assert joined.is_float
    assert joined.dequantize().equal(rounded.dequantize())
