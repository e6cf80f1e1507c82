"""Single products with matrices of random weights, made on the device in the form that the kernels read."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gptfast.kernels.cuda import ops
from gptfast.kernels.cuda.configurations import MAX_ROWS, Configuration, Gpu, Key, choose_configuration
from gptfast.kernels.cuda.packing import (
    ALIGNMENT,
    DTYPES,
    MIDDLES,
    WEIGHTS_PER_WORD,
    Kind,
    PackedWeight,
    arrange_inputs,
    arrange_rows,
    pack,
    pad_columns,
)

FLOAT8_SCALE = 1 / 64


@dataclass(frozen=True)
class Format:
    """How a matrix is held.

    Attributes:
        kind: of a weight.
        group_size: inputs that share a scale; None for a scale per row, or none of bf16 and fp16.
        has_mins: whether each group has a least value of its own.
    """

    kind: Kind
    group_size: int | None = None
    has_mins: bool = False

    @property
    def name(self) -> str:
        """For reports: `int4 g32 mins`."""
        if self.kind in ("bf16", "fp16"):
            return self.kind
        group = "channel" if self.group_size is None else f"g{self.group_size}"
        return f"{self.kind} {group}{' mins' if self.has_mins else ''}"

    def fits(self, in_features: int) -> bool:
        """Whether groups divide the rows."""
        return self.group_size is None or in_features % self.group_size == 0


@dataclass(frozen=True)
class Product:
    """A product with a matrix (out_features, in_features) of that form.

    Attributes:
        rows: of inputs.
        exact_rows: whether a single one is computed as several are.
        configuration: None for the one that is known to be best.
    """

    form: Format
    out_features: int
    in_features: int
    rows: int
    exact_rows: bool = False
    configuration: Configuration | None = None

    def __str__(self) -> str:
        """For reports."""
        rows = "1 row" if self.rows == 1 else f"{self.rows} rows"
        return f"{self.form.name}, {self.out_features} x {self.in_features}, {rows}"

    @property
    def shape(self) -> tuple[int, int]:
        """Of the matrix."""
        return self.out_features, self.in_features

    @property
    def key(self) -> Key:
        """What its configuration is found by."""
        weight = describe_packed(self.form, self.out_features, self.in_features)
        group_size = find_format(weight).group_size or 0
        return self.form.kind, self.rows > 1 or self.exact_rows, self.out_features, weight.width, group_size

    def find_configuration(self, gpu: Gpu | None) -> Configuration:
        """Its own, or the one that is in use on a GPU."""
        if self.configuration is not None:
            return self.configuration
        kind, several_rows, *sizes = self.key
        return choose_configuration(kind, self.rows, *sizes, gpu, exact_rows=several_rows)

    def make(self, gpu: Gpu | None) -> None:
        """Compute it as on that GPU, of tensors on torch's default device that hold anything."""
        weight = describe_packed(self.form, self.out_features, self.in_features)
        x = torch.empty(self.rows, self.in_features, dtype=torch.bfloat16)
        configuration = self.find_configuration(gpu) if self.rows <= MAX_ROWS else None
        prepare_product(x, weight, exact_rows=self.exact_rows, configuration=configuration)()


def prepare_product(
    x: Tensor, weight: PackedWeight, *, exact_rows: bool = False, configuration: Configuration | None = None
) -> Callable[[], Tensor]:
    """The product of inputs (M, K) with a matrix, (M, N): the kernel alone, with the inputs in its order."""
    tensors = weight.words, weight.scales, weight.mins, None
    if x.shape[0] > MAX_ROWS:
        return functools.partial(ops.multiply_matrix, x, *tensors, weight.kind)
    if x.shape[0] == 1 and not exact_rows:
        inputs = arrange_inputs(x, weight.kind).contiguous()
        return functools.partial(ops.multiply_vector, inputs, *tensors, weight.kind, x.dtype, configuration)
    inputs = arrange_rows(x, weight.kind).contiguous()
    return functools.partial(ops.multiply_rows, inputs, *tensors, weight.kind, configuration)


def find_format(weight: PackedWeight) -> Format:
    """How a matrix is held."""
    has_groups = weight.scales is not None and weight.scales.shape[1] > 1
    return Format(weight.kind, weight.group_size if has_groups else None, weight.mins is not None)


def draw_packed(form: Format, out_features: int, in_features: int, generator: torch.Generator) -> PackedWeight:
    """A matrix (out_features, in_features) on the generator's device whose products with normal inputs are near 1.

    Integers are drawn as bits, evenly, with scales that differ by group; nothing is quantized.
    """
    return draw_on(generator.device, generator, form, out_features, in_features)


def describe_packed(form: Format, out_features: int, in_features: int) -> PackedWeight:
    """The same without memory."""
    return draw_on(torch.device("meta"), None, form, out_features, in_features)


def draw_on(
    device: torch.device, generator: torch.Generator | None, form: Format, out_features: int, in_features: int
) -> PackedWeight:
    """`draw_packed` on a device."""

    def draw_factors(groups: int) -> Tensor:
        """Float32 between 0.75 and 1.25."""
        return 0.75 + torch.rand(out_features, groups, device=device, generator=generator) / 2

    if form.kind in DTYPES:
        values = torch.empty(out_features, in_features, dtype=torch.bfloat16, device=device)
        size = in_features**-0.5 / (FLOAT8_SCALE if form.kind == "fp8" else 1)
        values = values.normal_(0.0, size, generator=generator).to(DTYPES[form.kind])
        if form.kind != "fp8":
            return pack(values)
        words = pad_columns(values.view(torch.uint8), ALIGNMENT).contiguous().view(torch.int32)
        return PackedWeight("fp8", words, in_features, (FLOAT8_SCALE * draw_factors(1)).bfloat16())
    width = -(-in_features // ALIGNMENT) * ALIGNMENT
    shape = out_features, width // WEIGHTS_PER_WORD[form.kind]
    words = torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device=device, generator=generator)
    groups = 1 if form.group_size is None else width // form.group_size
    # Of evenly distributed codes the deviation is the middle / sqrt(3).
    middle = MIDDLES[form.kind]
    scales = (in_features**-0.5 * 3**0.5 / middle * draw_factors(groups)).bfloat16()
    mins = None
    if form.has_mins:
        # Codes of int4 then count from 0, so that the least value is that of -8 without.
        offset = -middle if form.kind == "int4" else middle / 8
        mins = (offset * scales.float() * draw_factors(groups)).bfloat16()
    return PackedWeight(form.kind, words, in_features, scales, mins)


def count_bytes(weight: PackedWeight) -> int:
    """That a product reads of it."""
    return sum(values.nbytes for values in (weight.words, weight.scales, weight.mins) if values is not None)
