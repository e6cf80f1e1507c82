"""Products with int4 by the kernel that torch has for them, tinygemm; torchao's `Int4WeightOnlyConfig` calls it.

Shapes: N out_features, K in_features, G groups of a row.

The kernel computes w = (q - 8) * scale + zero in bfloat16, with q from 0 to 15.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gptfast.quantization import QuantizedWeight

GROUP_SIZES = (32, 64, 128, 256)
TILE_ROWS = 8
TILE_COLUMNS = 16
INNER_TILES = (8, 4, 2)
"""Tiles along a row that a thread loads at once, the most of them that divide it."""
MIDDLE = 8
"""The unsigned code whose weight is the zero of its group."""


@dataclass(frozen=True)
class TinygemmWeight:
    """A matrix (N, K) in the kernel's layout.

    Attributes:
        words: (N / 8, K / (16 * inner tiles), 32, inner tiles / 2) int32.
        scales_and_zeros: (G, N, 2) bfloat16.
        group_size: K / G.
    """

    words: Tensor
    scales_and_zeros: Tensor
    group_size: int

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.words.shape[0] * TILE_ROWS, self.scales_and_zeros.shape[0] * self.group_size


def explain_refusal(weight: QuantizedWeight) -> str | None:
    """What of a matrix the kernel cannot hold; None if it holds all."""
    rows, columns = weight.shape
    if weight.bits != 4:
        return f"it is int{weight.bits}, and the kernel has int4"
    if weight.group_size not in GROUP_SIZES:
        return f"its groups are of {weight.group_size} inputs, and the kernel has {GROUP_SIZES}"
    if rows % TILE_ROWS:
        return f"{rows} outputs are no multiple of {TILE_ROWS}"
    if columns % (INNER_TILES[-1] * TILE_COLUMNS):
        return f"{columns} inputs are no multiple of {INNER_TILES[-1] * TILE_COLUMNS}"
    return None


def pack(weight: QuantizedWeight) -> TinygemmWeight:
    """Bring a matrix into the kernel's layout, on a GPU of sm_80 or later; scales and zeros are rounded to bfloat16.

    Raises ValueError for what `explain_refusal` refuses.
    """
    reason = explain_refusal(weight)
    if reason is not None:
        raise ValueError(f"tinygemm cannot hold the matrix: {reason}")
    tiles = weight.shape[1] // TILE_COLUMNS
    inner_tiles = next(number for number in INNER_TILES if tiles % number == 0)
    words: Tensor = torch.ops.aten._convert_weight_to_int4pack.default(pack_codes(weight), inner_tiles)
    scales_and_zeros = compute_scales_and_zeros(weight).bfloat16().contiguous()
    return TinygemmWeight(words, scales_and_zeros, weight.group_size)


def pack_codes(weight: QuantizedWeight) -> Tensor:
    """(N, K / 2) uint8, what the library rearranges: of two inputs that are neighbours the first in the upper bits."""
    middle = MIDDLE if weight.compute_mins() is None else 0
    codes = (weight.codes + middle).to(torch.uint8)
    return codes[:, 0::2] << 4 | codes[:, 1::2]


def compute_scales_and_zeros(weight: QuantizedWeight) -> Tensor:
    """(G, N, 2) float32."""
    mins = weight.compute_mins()
    zeros = torch.zeros_like(weight.scales) if mins is None else mins + MIDDLE * weight.scales
    return torch.stack([weight.scales, zeros], dim=-1).transpose(0, 1)


def is_exact(weight: QuantizedWeight) -> bool:
    """Whether the kernel's bfloat16 holds every scale and zero as it is."""
    values = compute_scales_and_zeros(weight)
    return torch.equal(values.bfloat16().float(), values)


def multiply(x: Tensor, weight: TinygemmWeight) -> Tensor:
    """Activations (..., K) bfloat16 times the matrix: (..., N) bfloat16. It is read once for every 16 rows."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    product: Tensor = torch.ops.aten._weight_int4pack_mm.default(
        rows, weight.words, weight.group_size, weight.scales_and_zeros
    )
    return product.view(*x.shape[:-1], -1)
