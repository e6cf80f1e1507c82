"""Matrices as small integers or floats: the form that readers and rounding produce and that kernels pack.

Shapes: N out_features, K in_features, G groups of `group_size` consecutive inputs of a row.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SUPER_BLOCK = 256
"""Inputs that share a super scale in llama.cpp's K-quants."""


@dataclass(frozen=True)
class WeightScheme:
    """How a matrix is rounded.

    Attributes:
        bits: 4 or 8.
        group_size: inputs that share a scale; None for one scale per output channel.
        symmetric: whether zero is the middle code; else every group has a zero of its own.
        is_float: whether codes are floats, in torch's words float8_e4m3fn; `FLOAT8` is the only such scheme.
    """

    bits: int
    group_size: int | None
    symmetric: bool = True
    is_float: bool = False

    def __post_init__(self) -> None:
        assert not self.is_float or (self.bits, self.group_size, self.symmetric) == (8, None, True)

    @property
    def dtype(self) -> torch.dtype:
        """Of its codes."""
        return torch.float8_e4m3fn if self.is_float else torch.int8

    def get_group_size(self, columns: int) -> int:
        """Inputs that share a scale in a matrix of that many columns."""
        return columns if self.group_size is None else self.group_size

    def describe(self) -> str:
        """Its name in reports: `int4 g32`, `int8 channel`, `int4 g64 asymmetric`, `fp8 channel`."""
        group = "channel" if self.group_size is None else f"g{self.group_size}"
        return f"{'fp' if self.is_float else 'int'}{self.bits} {group}{'' if self.symmetric else ' asymmetric'}"


FLOAT8 = WeightScheme(bits=8, group_size=None, is_float=True)


@dataclass(frozen=True)
class QuantizedWeight:
    """A matrix (N, K): w[n, k] = (codes[n, k] - zeros[n, g]) * scales[n, g] + mins[n, g] with g = k // group_size.

    Attributes:
        codes: (N, K) int8, of 4 bits -8 to 7 where there are neither zeros nor mins, else 0 to 15; or float8_e4m3fn,
            with a scale for every row and neither zeros nor mins.
        scales: (N, G) float32.
        bits: of a code: 4, 6 or 8.
        zeros: (N, G) int8, in the codes' range, or None for 0.
        mins: (N, G) float32, or None for 0; never beside zeros.
        super_scales: (N, K / 256) float32 of llama.cpp's K-quants, whose `scales` are small integers times these.
        super_mins: (N, K / 256) float32, the same of their `mins`.
    """

    codes: Tensor
    scales: Tensor
    bits: int
    zeros: Tensor | None = None
    mins: Tensor | None = None
    super_scales: Tensor | None = None
    super_mins: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        rows, columns = self.codes.shape
        return rows, columns

    @property
    def is_float(self) -> bool:
        """Whether codes are floats."""
        return self.codes.is_floating_point()

    @property
    def group_size(self) -> int:
        """Inputs that share a scale; K where a row has one."""
        return self.codes.shape[1] // self.scales.shape[1]

    def compute_mins(self) -> Tensor | None:
        """(N, G) float32 with w = codes * scales + mins, whether the matrix has zeros or mins; None if it has neither.

        A zero times a scale of at most 16 significant bits, as any that is stored in bfloat16 or float16, is exact.
        """
        return self.mins if self.zeros is None else -(self.zeros.float() * self.scales)

    def dequantize(self) -> Tensor:
        """The matrix (N, K) in float32."""
        rows, groups = self.scales.shape
        values = self.codes.view(rows, groups, -1).float()
        if self.zeros is not None:
            values -= self.zeros[..., None]
        values *= self.scales[..., None]
        if self.mins is not None:
            values += self.mins[..., None]
        return values.view(self.shape)

    def select_rows(self, rows: slice) -> QuantizedWeight:
        """Some of its rows."""
        selected = {name: None if value is None else value[rows] for name, value in self.list_tensors().items()}
        return dataclasses.replace(self, **selected)  # type: ignore[arg-type]

    def to(self, device: torch.device) -> QuantizedWeight:
        """The same matrix there."""
        moved = {name: None if value is None else value.to(device) for name, value in self.list_tensors().items()}
        return dataclasses.replace(self, **moved)  # type: ignore[arg-type]

    def list_tensors(self) -> dict[str, Tensor | None]:
        """Its tensors by name; every one has a row for each of the matrix."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if name != "bits"}


def slice_rows(shape: tuple[int, ...], elements: int) -> Iterator[slice]:
    """The rows of a tensor (N, ...), so many at a time that they have at most so many elements, or one by one."""
    rows, *others = shape
    step = max(1, elements // math.prod(others))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def join_rows(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """One matrix of the rows of all, which have bits, groups, zeros and mins alike."""
    tensors = [part.list_tensors() for part in parts]
    joined = {
        name: None if value is None else torch.cat([each[name] for each in tensors])  # type: ignore[misc]
        for name, value in tensors[0].items()
    }
    return dataclasses.replace(parts[0], **joined)  # type: ignore[arg-type]
