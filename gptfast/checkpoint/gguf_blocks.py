"""ggml's block formats as small integers with their scales: no float of a weight is made.

The layouts are those of `ggml-common.h` of llama.cpp. N rows and K columns of a matrix, G groups and S super-blocks of
a row; b is the bytes of one block.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gptfast.quantization import QuantizedWeight

LOW_NIBBLE = 0x0F


def can_unpack(type_name: str) -> bool:
    """Whether the block format has an exact form of small integers here; the others have to be expanded."""
    return type_name in UNPACKERS


def unpack_blocks(data: Tensor, type_name: str) -> QuantizedWeight:
    """The matrix that `data` (N, bytes of a row) uint8 encodes in blocks of the named type."""
    unpack, block_bytes = UNPACKERS[type_name]
    return unpack(data.view(data.shape[0], -1, block_bytes))


def unpack_q4_0(blocks: Tensor) -> QuantizedWeight:
    """Blocks (N, G, b): a scale d and 32 codes u, w = d * (u - 8)."""
    codes = split_nibbles(blocks[..., 2:]) - 8
    return QuantizedWeight(codes=codes.flatten(1), scales=read_halves(blocks, 0), bits=4)


def unpack_q4_1(blocks: Tensor) -> QuantizedWeight:
    """Blocks (N, G, b): a scale d, a minimum m and 32 codes u, w = d * u + m."""
    codes = split_nibbles(blocks[..., 4:])
    return QuantizedWeight(codes=codes.flatten(1), scales=read_halves(blocks, 0), bits=4, mins=read_halves(blocks, 2))


def unpack_q8_0(blocks: Tensor) -> QuantizedWeight:
    """Blocks (N, G, b): a scale d and 32 signed codes q, w = d * q."""
    codes = blocks[..., 2:].contiguous().view(torch.int8)
    return QuantizedWeight(codes=codes.flatten(1), scales=read_halves(blocks, 0), bits=8)


def unpack_q4_k(blocks: Tensor) -> QuantizedWeight:
    """Super-blocks (N, S, b) of 8 groups of 32 codes u, w = d * sc * u - dmin * m with sc and m of 6 bits a group.

    The scales d * sc and the minima -dmin * m have at most 17 significant bits, so that float32 holds them exactly.
    """
    super_scales, super_mins = read_halves(blocks, 0), -read_halves(blocks, 2)
    scales, mins = split_six_bit_pairs(blocks[..., 4:16])
    codes = split_nibbles(torch.unflatten(blocks[..., 16:], -1, (4, 32)))
    return QuantizedWeight(
        codes=codes.flatten(1),
        scales=(scales * super_scales[..., None]).flatten(1),
        bits=4,
        mins=(mins * super_mins[..., None]).flatten(1),
        super_scales=super_scales,
        super_mins=super_mins,
    )


def unpack_q6_k(blocks: Tensor) -> QuantizedWeight:
    """Super-blocks (N, S, b) of 16 groups of 16 codes u of 6 bits, w = d * sc * (u - 32) with sc signed of 8 bits.

    The scales d * sc have at most 18 significant bits, so that float32 holds them exactly.
    """
    # Of each half of a super-block, 64 bytes hold the low bits of codes j and j + 64, and 32 bytes the high bits of
    # codes j, j + 32, j + 64 and j + 96.
    low = torch.unflatten(split_nibbles(torch.unflatten(blocks[..., :128], -1, (2, 64))), -1, (4, 32))
    high = torch.unflatten(blocks[..., 128:192], -1, (2, 32))
    codes = torch.stack([(high >> shift) & 3 for shift in (0, 2, 4, 6)], dim=-2).view(torch.int8)
    codes.bitwise_left_shift_(4).bitwise_or_(low).sub_(32)
    super_scales = read_halves(blocks, 208)
    scales = blocks[..., 192:208].view(torch.int8) * super_scales[..., None]
    return QuantizedWeight(codes=codes.flatten(1), scales=scales.flatten(1), bits=6, super_scales=super_scales)


def read_halves(blocks: Tensor, offset: int) -> Tensor:
    """The float16 number at that offset of every block (N, G, b): (N, G) float32."""
    return blocks[..., offset : offset + 2].view(torch.float16)[..., 0].float()


def split_nibbles(data: Tensor) -> Tensor:
    """Bytes (..., n) uint8 to codes (..., 2n) int8, 0 to 15: the low halves of all bytes, then the high ones."""
    codes = torch.empty(*data.shape[:-1], 2, data.shape[-1], dtype=torch.uint8)
    torch.bitwise_and(data, LOW_NIBBLE, out=codes[..., 0, :])
    torch.bitwise_right_shift(data, 4, out=codes[..., 1, :])
    return codes.view(torch.int8).flatten(-2)


def split_six_bit_pairs(data: Tensor) -> tuple[Tensor, Tensor]:
    """The 8 scales and 8 minima (..., 8) uint8 of 6 bits that the 12 bytes (..., 12) of a Q4_K super-block hold.

    The first 4 of each lie in the low bits of bytes 0 to 3 and 4 to 7; the last 4 have their low bits in bytes 8 to 11
    and their two high bits in the high bits of the bytes of the first 4.
    """
    scales, mins, rest = torch.unflatten(data, -1, (3, 4)).unbind(-2)
    return (
        torch.cat([scales & 0x3F, (rest & LOW_NIBBLE) | ((scales >> 2) & 0x30)], dim=-1),
        torch.cat([mins & 0x3F, (rest >> 4) | ((mins >> 2) & 0x30)], dim=-1),
    )


UNPACKERS: dict[str, tuple[Callable[[Tensor], QuantizedWeight], int]] = {
    "Q4_0": (unpack_q4_0, 18),
    "Q4_1": (unpack_q4_1, 20),
    "Q8_0": (unpack_q8_0, 34),
    "Q4_K": (unpack_q4_k, 144),
    "Q6_K": (unpack_q6_k, 210),
}
"""By the name of the type: the function and the bytes of one of its blocks."""
