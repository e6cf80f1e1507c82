"""Bring a matrix into the layout of the CPU kernels, which gptfast/kernels/cpu/layout.h describes."""

from __future__ import annotations

import torch
from torch import Tensor

from gptfast.quantization import SUPER_BLOCK, QuantizedWeight

BLOCK = 32
"""Inputs that the kernels take at once."""


def pack(weight: Tensor | QuantizedWeight) -> Tensor:
    """A matrix (N, K) as a vector of bytes for `gptfast.kernels.ops`.

    A dense one keeps its dtype: float32, float16 or bfloat16. Of a quantized one, codes, scales and mins keep their
    values; scales are held in float16 where all of them are exact in it, else in float32.
    """
    if isinstance(weight, Tensor):
        packed: Tensor = torch.ops.gptfast.pack_dense(weight.contiguous())
        return packed
    mins = weight.compute_mins()
    super_scales = super_mins = None
    if weight.super_scales is not None:
        scales, super_scales = split_super_blocks(weight.scales, weight.super_scales, signed=mins is None)
        if mins is not None:
            assert weight.super_mins is not None
            mins, super_mins = split_super_blocks(mins, weight.super_mins, signed=False)
    else:
        dtype = torch.float16 if is_exact_in_half(weight.scales, mins) else torch.float32
        scales, mins = weight.scales.to(dtype), None if mins is None else mins.to(dtype)
    packed = torch.ops.gptfast.pack_quantized(
        weight.codes.contiguous(), scales, mins, super_scales, super_mins, weight.bits
    )
    return packed


def can_pack(weight: QuantizedWeight) -> bool:
    """Whether the kernels have it: integers in groups of a multiple of 32 inputs, or llama.cpp's K-quants."""
    columns = weight.shape[1]
    if weight.super_scales is not None:
        return columns % SUPER_BLOCK == 0 and weight.group_size == (16 if weight.bits == 6 else BLOCK)
    return weight.bits != 6 and not weight.is_float and (weight.group_size == columns or weight.group_size % BLOCK == 0)


def is_exact_in_half(*values: Tensor | None) -> bool:
    """Whether float16 holds every value as it is."""
    return all(torch.equal(value.half().float(), value) for value in values if value is not None)


def split_super_blocks(scales: Tensor, super_scales: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """The small integers (N, G) that the super scales (N, S) were multiplied with, and these in float16."""
    rows = scales.shape[0]
    wide = super_scales[..., None].float()
    integers = torch.where(wide == 0, 0.0, scales.view(rows, super_scales.shape[1], -1) / wide).round()
    dtype = torch.int8 if signed else torch.uint8
    return integers.to(dtype).view(rows, -1), super_scales.half()
