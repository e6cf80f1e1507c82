"""torch's operators for int4 on CUDA, which it has for no CPU, as they are documented.

Shapes: M rows of inputs, N out_features, K in_features, G groups of a row, T tiles along a row that a thread loads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

TILE_ROWS, TILE_COLUMNS, THREADS = 8, 16, 32


def convert(packed: Tensor, inner_tiles: int) -> Tensor:
    """Two codes in a byte (N, K / 2) uint8, the first in the upper bits: (N / 8, K / 16T, 32, T / 2) int32.

    Where in a tile a code then is, the kernel alone knows; here it stays in its row.
    """
    assert packed.dtype == torch.uint8
    assert packed.is_contiguous()
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    assert inner_tiles in (2, 4, 8)
    assert rows % TILE_ROWS == 0
    assert columns % (inner_tiles * TILE_COLUMNS) == 0
    shape = rows // TILE_ROWS, columns // (inner_tiles * TILE_COLUMNS), THREADS, inner_tiles // 2
    return packed.view(torch.int32).view(shape)


def multiply(x: Tensor, words: Tensor, group_size: int, scales_and_zeros: Tensor) -> Tensor:
    """(M, K) bfloat16 times w = (q - 8) * scale + zero, with both (G, N, 2) bfloat16: (M, N) bfloat16."""
    assert x.dtype == scales_and_zeros.dtype == torch.bfloat16
    assert x.is_contiguous()
    assert scales_and_zeros.is_contiguous()
    assert group_size in (32, 64, 128, 256)
    rows = words.shape[0] * TILE_ROWS
    assert scales_and_zeros.shape == (x.shape[1] // group_size, rows, 2)
    packed = words.reshape(rows, -1).view(torch.uint8)
    codes = torch.stack([packed >> 4, packed & 15], dim=-1).view(rows, -1, group_size).float()
    scales, zeros = scales_and_zeros.float().transpose(0, 1).unbind(-1)
    weight = (codes - 8) * scales[..., None] + zeros[..., None]
    return (x.float() @ weight.view(rows, -1).T).bfloat16()


def register() -> object:
    """Have torch run both on CPU tensors, as long as what is returned is there."""
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("_convert_weight_to_int4pack", convert, "CPU")
    library.impl("_weight_int4pack_mm", multiply, "CPU")
    return library
