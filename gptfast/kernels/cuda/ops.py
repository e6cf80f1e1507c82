"""Products with packed matrices on CUDA as operators, with their shapes for the compiler.

Shapes: M rows of inputs, N out_features, K in_features, and those of `gptfast.kernels.cuda.packing`.

Nothing here imports Triton until an operator runs. Under Triton's interpreter the operators run on CPU tensors too.
"""

from __future__ import annotations

import contextlib
import functools
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gptfast.kernels.cuda.configurations import MAX_ROWS, Configuration, choose_configuration, identify_gpu
from gptfast.kernels.cuda.packing import (
    ALIGNMENT,
    DTYPES,
    WEIGHTS_PER_WORD,
    Kind,
    PackedWeight,
    arrange_inputs,
    arrange_rows,
    get_zero,
    pad_columns,
)
from gptfast.quantization import slice_rows

SCRATCH_ELEMENTS = 2**26
"""Of a matrix that are expanded at once for many rows of inputs: 128 MiB in bfloat16."""
EXPANDED = Configuration(block_rows=4, block_words=128, warps=4)
"""The part of a matrix that a program expands."""


def linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None, *, exact_rows: bool = False) -> Tensor:
    """Activations (..., K) times a packed matrix (N, K), plus the bias (N,): (..., N) in x's dtype.

    Sums are in float32. Up to 16 rows the packed matrix is read once; above, it is expanded to x's dtype. With
    `exact_rows`, the result of a row among up to 16 does not depend on how many they are; without it, that of a single
    one may differ by rounding.
    """
    rows = x.reshape(-1, x.shape[-1])
    tensors = weight.words, weight.scales, weight.mins, bias
    if rows.shape[0] > MAX_ROWS or rows.shape[0] == 0:
        result = torch.ops.gptfast.cuda_multiply_matrix.default(rows, *tensors, weight.kind)
    elif rows.shape[0] == 1 and not exact_rows:
        inputs = arrange_inputs(rows, weight.kind).contiguous()
        result = torch.ops.gptfast.cuda_multiply_vector.default(inputs, *tensors, weight.kind, x.dtype)
    else:
        inputs = arrange_rows(rows, weight.kind).contiguous()
        result = torch.ops.gptfast.cuda_multiply_rows.default(inputs, *tensors, weight.kind)
    product: Tensor = result.view(*x.shape[:-1], weight.words.shape[0])
    return product


def multiply_vector(
    inputs: Tensor,
    words: Tensor,
    scales: Tensor | None,
    mins: Tensor | None,
    bias: Tensor | None,
    kind: Kind,
    dtype: torch.dtype,
    configuration: Configuration | None = None,
) -> Tensor:
    """One row of inputs (1, P, W), as `arrange_inputs` makes them: (1, N) of `dtype`.

    `configuration` is how it is cut; None for what is known to be best.
    """
    from gptfast.kernels.cuda import linear as kernels

    assert inputs.shape[0] == 1
    assert inputs.is_contiguous()
    configuration = configuration or find_configuration(1, words, scales, kind, exact_rows=False)
    constants = list_constants(kind, words, scales, mins, configuration)
    out = inputs.new_empty(1, words.shape[0], dtype=dtype)
    with select_device(inputs):
        kernels.multiply_vector[(-(-words.shape[0] // configuration.block_rows),)](
            out,
            inputs,
            words,
            scales,
            mins,
            bias,
            words.shape[0],
            kernels.MAGIC,
            **constants,
            num_warps=configuration.warps,
            num_stages=configuration.stages,
            enable_fp_fusion=True,
        )
    return out


def multiply_rows(
    inputs: Tensor,
    words: Tensor,
    scales: Tensor | None,
    mins: Tensor | None,
    bias: Tensor | None,
    kind: Kind,
    configuration: Configuration | None = None,
) -> Tensor:
    """M <= 16 rows of inputs (M, P, W), as `arrange_rows` makes them: (M, N) in their dtype; see `multiply_vector`."""
    from gptfast.kernels.cuda import linear as kernels

    rows = inputs.shape[0]
    assert rows <= MAX_ROWS
    assert inputs.is_contiguous()
    configuration = configuration or find_configuration(rows, words, scales, kind, exact_rows=True)
    matrix = view_elements(words, kind)
    constants = list_constants(kind, matrix, scales, mins, configuration)
    out = inputs.new_empty(rows, words.shape[0])
    with select_device(inputs):
        kernels.multiply_rows[(-(-words.shape[0] // configuration.block_rows),)](
            out,
            inputs,
            matrix,
            scales,
            mins,
            bias,
            rows,
            words.shape[0],
            **constants,
            splits=configuration.splits,
            operand=kernels.get_operand(str(inputs.dtype).removeprefix("torch.")),
            num_warps=configuration.warps,
            num_stages=count_stages(configuration, inputs.dtype),
            enable_fp_fusion=True,
        )
    return out


def multiply_matrix(
    x: Tensor, words: Tensor, scales: Tensor | None, mins: Tensor | None, bias: Tensor | None, kind: Kind
) -> Tensor:
    """Any number of rows of inputs (M, K): (M, N) in their dtype, by the library's product with the expanded matrix.

    It is expanded in parts, so that the buffer, which the allocator hands out again and again, stays small.
    """
    x = pad_columns(x, ALIGNMENT)
    matrix = view_elements(words, kind)
    bias = None if bias is None else bias.to(x.dtype)
    out = x.new_empty(x.shape[0], words.shape[0])
    scratch = None
    for rows in slice_rows((words.shape[0], x.shape[1]), SCRATCH_ELEMENTS):
        if kind in DTYPES and kind != "fp8":
            part = matrix[rows].to(x.dtype)
        else:
            scratch = x.new_empty(rows.stop - rows.start, x.shape[1]) if scratch is None else scratch
            part = scratch[: rows.stop - rows.start]
            expand_rows(part, words[rows], select(scales, rows), select(mins, rows), kind)
        out[:, rows] = F.linear(x, part, select(bias, rows))
    return out


def select(values: Tensor | None, rows: slice) -> Tensor | None:
    """Some rows of a tensor, if there is one."""
    return None if values is None else values[rows]


def expand_rows(out: Tensor, words: Tensor, scales: Tensor | None, mins: Tensor | None, kind: Kind) -> None:
    """Write the matrix as floats into `out` (N, P * W)."""
    from gptfast.kernels.cuda import linear as kernels

    grid = (-(-words.shape[0] // EXPANDED.block_rows), -(-words.shape[1] // EXPANDED.block_words))
    constants = list_constants(kind, words, scales, mins, EXPANDED)
    del constants["even_rows"]
    with select_device(out):
        kernels.expand_rows[grid](
            out, words, scales, mins, words.shape[0], **constants, num_warps=EXPANDED.warps, enable_fp_fusion=True
        )


def select_device(tensor: Tensor) -> contextlib.AbstractContextManager[None]:
    """Have kernels launched on the device of a tensor; where Triton's interpreter runs them there is nothing to do."""
    context: contextlib.AbstractContextManager[None] = torch.cuda.device_of(tensor)  # type: ignore[no-untyped-call]
    return context


def view_elements(words: Tensor, kind: Kind) -> Tensor:
    """(N, W) words; of bf16 and fp16 the (N, 2 * W) weights in them."""
    return words.view(DTYPES[kind]) if kind in ("bf16", "fp16") else words


def find_configuration(
    rows: int, words: Tensor, scales: Tensor | None, kind: Kind, *, exact_rows: bool
) -> Configuration:
    """What `choose_configuration` says of a matrix on its device."""
    width = words.shape[1] * WEIGHTS_PER_WORD[kind]
    group_size = 0 if scales is None or scales.shape[1] == 1 else width // scales.shape[1]
    gpu = identify_gpu(words.device) if words.is_cuda else None
    return choose_configuration(kind, rows, words.shape[0], width, group_size, gpu, exact_rows=exact_rows)


def count_stages(configuration: Configuration, dtype: torch.dtype) -> int:
    """Loads in flight of `multiply_rows`: of wide inputs few, or shared memory would not hold them on every GPU."""
    return configuration.stages if dtype.itemsize == 2 else min(configuration.stages, 2)


def list_constants(
    kind: Kind, matrix: Tensor, scales: Tensor | None, mins: Tensor | None, configuration: Configuration
) -> dict[str, Any]:
    """What the kernels are compiled for, of a matrix (N, W) of words or of elements."""
    return {
        "W": matrix.shape[1],
        "G": 1 if scales is None else scales.shape[1],
        "P": WEIGHTS_PER_WORD[kind] if matrix.dtype == torch.int32 else 1,
        "kind": kind,
        "zero": get_zero(kind, has_mins=mins is not None),
        "even_rows": matrix.shape[0] % configuration.block_rows == 0,
        "block_rows": configuration.block_rows,
        "block_words": configuration.block_words,
    }


@functools.cache
def register_operators() -> object:
    """Make the operators known to torch, once; on CPU tensors they run under Triton's interpreter alone.

    They are there as long as what is returned.
    """
    library: Any = torch.library.Library("gptfast", "FRAGMENT")  # type: ignore[no-untyped-call]
    tensors = "Tensor words, Tensor? scales, Tensor? mins, Tensor? bias, str kind"
    is_interpreted = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on")
    keys = ["CUDA", "CPU"] if is_interpreted else ["CUDA"]
    for name, schema, implementation, shape in (
        ("vector", f"Tensor inputs, {tensors}, ScalarType dtype", multiply_vector, vector_shape),
        ("rows", f"Tensor inputs, {tensors}", multiply_rows, rows_shape),
        ("matrix", f"Tensor x, {tensors}", multiply_matrix, rows_shape),
    ):
        library.define(f"cuda_multiply_{name}({schema}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
        for key in keys:
            library.impl(f"cuda_multiply_{name}", implementation, key)
        torch.library.register_fake(f"gptfast::cuda_multiply_{name}", shape, lib=library)
    return library


def vector_shape(
    inputs: Tensor,
    words: Tensor,
    scales: Tensor | None,
    mins: Tensor | None,
    bias: Tensor | None,
    kind: str,
    dtype: torch.dtype,
) -> Tensor:
    """What `multiply_vector` returns."""
    return inputs.new_empty(1, words.shape[0], dtype=dtype)


def rows_shape(
    inputs: Tensor, words: Tensor, scales: Tensor | None, mins: Tensor | None, bias: Tensor | None, kind: str
) -> Tensor:
    """What `multiply_rows` and `multiply_matrix` return."""
    return inputs.new_empty(inputs.shape[0], words.shape[0])
