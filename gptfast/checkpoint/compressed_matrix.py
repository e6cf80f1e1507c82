"""A matrix as compressed-tensors stores it: its parts checked against each other, its codes unpacked.

A module P of a weight (N, K) with G groups in a row stores, by its format,

- `pack-quantized`: `P.weight_packed` int32, the codes of a row side by side, the first in the lowest bits, each with
  2**(bits - 1) added, and `P.weight_shape`, which is N and K;
- `int-quantized`: `P.weight` int8 (N, K);
- `float-quantized`: `P.weight` float8_e4m3fn (N, K), which is always symmetric;

and with all `P.weight_scale` (N, G) and, where it is asymmetric, `P.weight_zero_point` (N, G), which
`pack-quantized` packs like the codes, but the codes of a column side by side. w = (code - zero) * scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gptfast.checkpoint.base import DTYPE_NAMES
from gptfast.checkpoint.compressed_tensors import StoredScheme
from gptfast.errors import CheckpointError
from gptfast.quantization import QuantizedWeight

WORD_BITS = 32


@dataclass(frozen=True)
class CompressedMatrix:
    """A matrix (N, K), its codes still as they are stored.

    Attributes:
        stored: (N, words of a row) int32, or (N, K) int8 or float8_e4m3fn.
        shape: (N, K).
        scheme: how it is stored.
        scales: (N, G) float32.
        zeros: (N, G) int8, as `QuantizedWeight` has them.
    """

    stored: Tensor
    shape: tuple[int, int]
    scheme: StoredScheme
    scales: Tensor
    zeros: Tensor | None

    def read_rows(self, rows: slice) -> QuantizedWeight:
        """Some of its rows."""
        codes, rounding = self.stored[rows], self.scheme.rounding
        if self.scheme.is_packed:
            codes = unpack_words(codes, rounding.bits, self.shape[1])
            if rounding.bits == 4 and rounding.symmetric:
                codes -= 8
        zeros = None if self.zeros is None else self.zeros[rows]
        return QuantizedWeight(codes=codes, scales=self.scales[rows], bits=rounding.bits, zeros=zeros)


@dataclass(frozen=True)
class StoredParts:
    """The tensors of one quantized module; errors name them by it.

    Attributes:
        path: the checkpoint.
        module: the name before the last dot.
        find: returns a tensor by its stored name, or None if there is none.
    """

    path: Path
    module: str
    find: Callable[[str], Tensor | None]

    def get(self, part: str, shape: tuple[int, ...], *dtypes: torch.dtype) -> Tensor:
        """The part; raises CheckpointError if it is not of that shape and of one of these dtypes."""
        tensor = self.find(f"{self.module}.{part}")
        if tensor is None:
            raise self.refuse(part, "is missing")
        if tuple(tensor.shape) != shape:
            raise self.refuse(part, f"has shape {list(tensor.shape)} where {list(shape)} is needed")
        if tensor.dtype not in dtypes:
            raise self.refuse(part, f"is stored as {tensor.dtype} where {dtypes[0]} is needed")
        return tensor

    def refuse(self, part: str, problem: str) -> CheckpointError:
        """The error for a part that has this problem."""
        return CheckpointError(
            f"tensor {self.module}.{part} in {self.path} {problem}; its quantization_config is that of another "
            "checkpoint, or it is damaged"
        )


def open_matrix(parts: StoredParts, scheme: StoredScheme) -> CompressedMatrix:
    """The matrix of these parts; raises CheckpointError if one contradicts the others or the scheme."""
    bits, has_one_scale = scheme.rounding.bits, scheme.has_one_scale
    codes_name = "weight_packed" if scheme.is_packed else "weight"
    rows, columns = shape = _read_shape(parts, scheme)
    stored_shape = (rows, count_words(columns, bits)) if scheme.is_packed else shape
    stored = parts.get(codes_name, stored_shape, torch.int32 if scheme.is_packed else scheme.rounding.dtype)
    group_size = scheme.rounding.get_group_size(columns)
    if columns % group_size:
        raise parts.refuse(codes_name, f"has rows of {columns} weights, no multiple of the group_size {group_size}")
    groups = columns // group_size
    _check_order(parts, columns, group_size)
    scales = parts.get("weight_scale", (1,) if has_one_scale else (rows, groups), *DTYPE_NAMES).float()
    if not torch.isfinite(scales).all():
        raise parts.refuse("weight_scale", "has values that are not finite")
    zeros = None if scheme.rounding.symmetric else _read_zeros(parts, scheme, rows, groups)
    return CompressedMatrix(
        stored=stored,
        shape=shape,
        scheme=scheme,
        scales=scales.expand(rows, groups).contiguous(),
        zeros=None if zeros is None else zeros.expand(rows, groups).contiguous(),
    )


def count_words(count: int, bits: int) -> int:
    """The int32 words that so many codes take side by side."""
    return -(-count * bits // WORD_BITS)


def unpack_words(words: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` codes of every row of int32 words (N, W): (N, count) int8, 0 to 15 or, of 8 bits, signed."""
    data = words.contiguous().view(torch.uint8)
    if bits == 8:
        return (data[:, :count] ^ 0x80).view(torch.int8)
    codes = torch.stack([data & 0x0F, data >> 4], dim=-1).flatten(1)
    return codes[:, :count].contiguous().view(torch.int8)


def _read_shape(parts: StoredParts, scheme: StoredScheme) -> tuple[int, int]:
    if scheme.is_packed:
        rows, columns = parts.get("weight_shape", (2,), torch.int64, torch.int32).tolist()
        if min(rows, columns) < 1:
            raise parts.refuse("weight_shape", f"is [{rows}, {columns}]")
        return rows, columns
    weight = parts.find(f"{parts.module}.weight")
    if weight is None or weight.dim() != 2 or not weight.numel():
        raise parts.refuse("weight", "is not a matrix")
    return weight.shape[0], weight.shape[1]


def _read_zeros(parts: StoredParts, scheme: StoredScheme, rows: int, groups: int) -> Tensor:
    """(N, G) int8, or (1,) if the whole matrix has one."""
    bits = scheme.rounding.bits
    if scheme.is_packed and not scheme.has_one_scale:
        words = parts.get("weight_zero_point", (count_words(rows, bits), groups), torch.int32)
        return unpack_words(words.T, bits, rows).T
    zeros = parts.get("weight_zero_point", (1,) if scheme.has_one_scale else (rows, groups), torch.int8)
    if bits == 8:
        return zeros
    if not -8 <= int(zeros) <= 7:
        raise parts.refuse("weight_zero_point", f"is {int(zeros)}, which is no int4")
    return zeros + 8


def _check_order(parts: StoredParts, columns: int, group_size: int) -> None:
    """Raise CheckpointError if the columns of a group are not consecutive.

    -1 in all places stands for an order that was never made.
    """
    if parts.find(f"{parts.module}.weight_g_idx") is None:
        return
    groups = parts.get("weight_g_idx", (columns,), torch.int32, torch.int64)
    if not torch.equal(groups, torch.arange(columns, dtype=groups.dtype) // group_size) and not (groups == -1).all():
        raise CheckpointError(
            f"tensor {parts.module}.weight_g_idx in {parts.path} orders the columns by activation, which is not "
            "supported; quantize the model again with actorder 'weight' instead of 'group'"
        )
