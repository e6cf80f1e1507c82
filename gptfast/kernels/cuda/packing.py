"""Bring a matrix into the layout of the CUDA kernels, and activations into the order in which they read it.

Shapes: M rows of inputs, N out_features, K in_features, W words of a row, P weights of a word, G groups of a row.

A row is W words of 32 bits, of which word j holds the weights k = P * j to P * j + P - 1, the first in the lowest bits.
Rows are padded to a multiple of 32 weights, so that 16 bytes never straddle two rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from gptfast.quantization import QuantizedWeight

Kind = Literal["bf16", "fp16", "fp8", "int8", "int4"]
"""What a weight is: a float of that format, or an integer that counts from the middle of its range."""

WEIGHTS_PER_WORD: dict[Kind, int] = {"bf16": 2, "fp16": 2, "fp8": 4, "int8": 4, "int4": 8}
KINDS: dict[torch.dtype, Kind] = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8"}
"""fp8 on any GPU that has bfloat16: its bits are put into those of a float, for which nothing of sm89 is needed."""
DTYPES: dict[Kind, torch.dtype] = {kind: dtype for dtype, kind in KINDS.items()}
MIDDLES: dict[Kind, int] = {"int8": 128, "int4": 8}
"""The unsigned integer that stands for zero in a matrix without mins; of int8, in one with mins too."""
INPUT_FACTORS: dict[Kind, float] = {"bf16": 1.0, "fp16": 2.0**56, "fp8": 2.0**60, "int8": 256.0}
"""What `arrange_inputs` multiplies inputs with; of int4 it is 256 and 16 in turn."""
ALIGNMENT = 32
"""Weights whose multiple a row is."""


@dataclass(frozen=True)
class PackedWeight:
    """A matrix (N, K) as the kernels read it: w[n, k] = q[n, k] * scales[n, g] + mins[n, g] with g = k // group_size.

    Attributes:
        kind: of a weight q.
        words: (N, W) int32. Integers are unsigned: of int8 q + 128, of int4 q + 8 if there are no mins, else q.
        in_features: K.
        scales: (N, G) bfloat16, float16 or float32; None of bf16 and fp16.
        mins: (N, G) in the same dtypes, or None for 0.
    """

    kind: Kind
    words: Tensor
    in_features: int
    scales: Tensor | None = None
    mins: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.words.shape[0], self.in_features

    @property
    def width(self) -> int:
        """K with the padding."""
        return self.words.shape[1] * WEIGHTS_PER_WORD[self.kind]

    @property
    def group_size(self) -> int:
        """Weights that share a scale: a power of two, or the width where a row has one."""
        return self.width if self.scales is None else self.width // self.scales.shape[1]

    def select_rows(self, rows: Tensor) -> PackedWeight:
        """The rows of these indices, int64, in their order."""
        scales, mins = (None if values is None else values[rows] for values in (self.scales, self.mins))
        return PackedWeight(self.kind, self.words[rows], self.in_features, scales, mins)

    @property
    def zero(self) -> int:
        """The unsigned integer that stands for q = 0."""
        return get_zero(self.kind, has_mins=self.mins is not None)


def pack(weight: Tensor | QuantizedWeight, scales: Tensor | None = None) -> PackedWeight:
    """Bring a matrix (N, K) into the layout of the kernels, on its device.

    A dense one is of bfloat16 or float16, or of float8_e4m3fn with `scales` (N,). Of a quantized one, codes, scales
    and mins keep their values; scales and mins are held in 2 bytes where all of them are exact so, and codes of 6 bits
    become int8. Raises ValueError for what `can_pack` refuses.
    """
    if isinstance(weight, QuantizedWeight):
        return pack(weight.codes, weight.scales[:, 0]) if weight.is_float else pack_quantized(weight)
    if weight.dtype not in KINDS:
        raise ValueError(f"the CUDA kernels have no matrices of {weight.dtype}; convert it to bfloat16 or float16")
    kind = KINDS[weight.dtype]
    if (scales is not None) != (kind == "fp8"):
        raise ValueError(f"a matrix of {weight.dtype} {'needs' if kind == 'fp8' else 'has no'} scales")
    raw = weight.view(torch.uint8 if kind == "fp8" else torch.int16)
    words = pad_columns(raw, ALIGNMENT).contiguous().view(torch.int32)
    return PackedWeight(kind, words, weight.shape[1], None if scales is None else narrow(scales.float()[:, None]))


def pack_quantized(weight: QuantizedWeight) -> PackedWeight:
    """`pack` of integers."""
    if not can_pack(weight):
        raise ValueError(f"the CUDA kernels have no int{weight.bits} in groups of {weight.group_size}")
    kind: Kind = "int4" if weight.bits == 4 else "int8"
    columns = weight.shape[1]
    mins = weight.compute_mins()
    zero = get_zero(kind, has_mins=mins is not None)
    codes = pad_columns((weight.codes.to(torch.int16) + zero).to(torch.uint8), ALIGNMENT, value=zero)
    if kind == "int4":
        codes = codes[:, 0::2] | (codes[:, 1::2] << 4)
    words = codes.contiguous().view(torch.int32)
    repeats, pieces = 1, 1
    if weight.group_size != columns:
        piece = get_power_of_two(weight.group_size)
        repeats, pieces = weight.group_size // piece, max(1, ALIGNMENT // piece)
    tensors = [
        None if values is None else narrow(pad_columns(values.repeat_interleave(repeats, dim=1), pieces))
        for values in (weight.scales, mins)
    ]
    return PackedWeight(kind, words, columns, *tensors)


def get_zero(kind: Kind, *, has_mins: bool) -> int:
    """The unsigned integer that stands for q = 0; 0 of floats."""
    return 0 if kind == "int4" and has_mins else MIDDLES.get(kind, 0)


def can_pack(weight: Tensor | QuantizedWeight) -> bool:
    """Whether the kernels have its dtype, or its groups: of a multiple of 32 inputs, of int8 16, or whole rows."""
    if isinstance(weight, Tensor):
        return weight.dtype in KINDS
    return weight.group_size == weight.shape[1] or weight.group_size % (32 if weight.bits == 4 else 16) == 0


def unpack(weight: PackedWeight) -> Tensor:
    """The matrix (N, K) in float32."""
    rows, columns = weight.shape
    if weight.kind in DTYPES:
        values = weight.words.view(DTYPES[weight.kind]).float()
    else:
        codes = weight.words.view(torch.uint8)
        if weight.kind == "int4":
            codes = torch.stack([codes & 15, codes >> 4], dim=-1).view(rows, -1)
        values = codes.float() - weight.zero
    if weight.scales is not None:
        values = values.view(rows, weight.scales.shape[1], -1) * weight.scales.float()[..., None]
        if weight.mins is not None:
            values += weight.mins.float()[..., None]
    return values.reshape(rows, -1)[:, :columns]


def pad_columns(matrix: Tensor, multiple: int, value: int = 0) -> Tensor:
    """A matrix (N, C) with columns of `value` added until their number is a multiple."""
    missing = -matrix.shape[1] % multiple
    return F.pad(matrix, (0, missing), value=value) if missing else matrix


def narrow(values: Tensor) -> Tensor:
    """In bfloat16 or float16 if that changes no value, else in float32; contiguous."""
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(values.to(dtype).float(), values):
            return values.to(dtype).contiguous()
    return values.contiguous()


def get_power_of_two(number: int) -> int:
    """The largest power of two that divides it."""
    return number & -number


def arrange_inputs(x: Tensor, kind: Kind) -> Tensor:
    """Activations (M, K) as `multiply_vector` reads them: (M, P, W) float32, with the input k = P * j + i at [i, j].

    The kernel puts the bits of a weight into a float where that costs no conversion, which leaves it too small by a
    power of two that may depend on i; the inputs carry that power. Tensor operations alone, for the compiler to fuse
    with what made x.
    """
    planes = split_into_planes(x.float(), kind)
    if kind == "int4":
        return planes * (256.0 - 240.0 * (torch.arange(8, device=x.device) % 2))[:, None]
    return planes * INPUT_FACTORS[kind]


def arrange_rows(x: Tensor, kind: Kind) -> Tensor:
    """Activations (M, K) as `multiply_rows` reads them: (M, P, W) in their dtype, of bf16 and fp16 (M, 1, K padded)."""
    return pad_columns(x, ALIGNMENT)[:, None] if kind in ("bf16", "fp16") else split_into_planes(x, kind)


def split_into_planes(x: Tensor, kind: Kind) -> Tensor:
    """Activations (M, K), padded to the width of a row, as (M, P, W): the input k = P * j + i at [i, j]."""
    return pad_columns(x, ALIGNMENT).view(x.shape[0], -1, WEIGHTS_PER_WORD[kind]).transpose(1, 2)
