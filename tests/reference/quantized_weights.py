"""Quantized matrices of random codes, of every form that readers and rounding produce."""

from __future__ import annotations

from typing import Literal

import torch

from gptfast.quantization import SUPER_BLOCK, QuantizedWeight


def draw_quantized(
    rows: int,
    columns: int,
    bits: int,
    group_size: int | None,
    offset: Literal["zeros", "mins"] | None = None,
) -> QuantizedWeight:
    """With scales of either sign that bfloat16 holds; weights are of a magnitude of 1."""
    generator = torch.Generator().manual_seed(rows * columns + bits)
    is_signed = bits == 8 or offset is None
    low = -(2 ** (bits - 1)) if is_signed else 0
    codes = torch.randint(low, low + 2**bits, (rows, columns), dtype=torch.int8, generator=generator)
    shape = (rows, columns // (group_size or columns))
    scales = (torch.rand(shape, generator=generator) + 0.1) / 2 ** (bits - 1)
    scales *= torch.randint(0, 2, shape, generator=generator) * 2 - 1
    return QuantizedWeight(
        codes,
        scales.bfloat16().float(),
        bits,
        zeros=torch.randint(low, low + 2**bits, shape, dtype=torch.int8, generator=generator)
        if offset == "zeros"
        else None,
        mins=torch.randn(shape, generator=generator).half().float() if offset == "mins" else None,
    )


def draw_k_quant(rows: int, columns: int, bits: int) -> QuantizedWeight:
    """As llama.cpp's: of 4 bits with mins and groups of 32, of 6 with groups of 16."""
    generator = torch.Generator().manual_seed(bits)
    group = 32 if bits == 4 else 16
    low, limit = (0, 64) if bits == 4 else (-128, 128)
    codes = torch.randint(0, 2**bits, (rows, columns), dtype=torch.int8, generator=generator)
    super_scales = (torch.rand(rows, columns // SUPER_BLOCK, generator=generator) / 1000).half().float()
    super_mins = -super_scales.flip(0)
    repeat = SUPER_BLOCK // group
    small = torch.randint(low, limit, (rows, columns // group), generator=generator).float()
    small_mins = torch.randint(0, 64, (rows, columns // group), generator=generator).float()
    return QuantizedWeight(
        codes if bits == 4 else codes - 32,
        small * super_scales.repeat_interleave(repeat, 1),
        bits,
        mins=small_mins * super_mins.repeat_interleave(repeat, 1) if bits == 4 else None,
        super_scales=super_scales,
        super_mins=super_mins if bits == 4 else None,
    )
