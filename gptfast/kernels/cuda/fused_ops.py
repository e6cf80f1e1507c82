"""Launch the kernels of `gptfast.kernels.cuda.fused`, which make a decoding step of few launches, one after another.

Shapes: those of that module. Nothing is allocated here but by `make_inputs`, so a CUDA graph can record a step. Tensors
are contiguous and on one device; those that hold what a kernel leaves for a later one belong to the caller.

With `pdl`, which needs sm_90, a kernel starts before the one launched before it has ended, and waits for it where it
must. The first of a step, `embed`, is launched without it and all others with it, or none.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gptfast.kernels.cuda.configurations import LOAD_WORDS, MAX_ROWS, THREADS, Configuration
from gptfast.kernels.cuda.ops import count_stages, find_configuration, list_constants, select_device, view_elements
from gptfast.kernels.cuda.packing import WEIGHTS_PER_WORD, Kind, PackedWeight

EMBEDDING_WORDS, EMBEDDING_WARPS = 1024, 4
"""The words of an embedding's row that a program expands at once, and with how many warps."""

AHEAD = 16
"""Weights of a row that a thread holds in a loop if it can: as it loads the next ones too, more would be spilled."""


@dataclass(frozen=True)
class Inputs:
    """What a product reads, in the order of its matrix, and what is yet to be multiplied with its sums.

    Attributes:
        planes: (M, P, W) float32 for the kernel of one row, as `packing.arrange_inputs` makes them, else in the dtype
            of activations, as `packing.arrange_rows` does. What pads a row stays 0.
        kind: of the matrix.
        is_vector: whether they are for the kernel of one row.
        squares: (M, parts) float32, sums of squares of the residual stream if the planes are that times a norm's gains;
            None if they are used as they are.
    """

    planes: Tensor
    kind: Kind
    is_vector: bool
    squares: Tensor | None = None

    @property
    def layout(self) -> dict[str, Any]:
        """What `fused.store_inputs` is told of the planes, as the constants of the kernels that write them."""
        _, per_word, words = self.planes.shape
        return {"next_W": words, "next_P": per_word, "next_kind": self.kind}


def make_inputs(
    weight: PackedWeight,
    rows: int,
    dtype: torch.dtype,
    *,
    exact_rows: bool,
    follows: PackedWeight | None = None,
    is_normed: bool = False,
) -> Inputs:
    """Memory for the inputs of a product with up to 16 `rows`, on its matrix's device.

    Args:
        weight: The product's matrix (N, K).
        rows: M.
        dtype: Of activations.
        exact_rows: Have a single row computed as several are, so that its bits are the same.
        is_normed: Whether the residual stream's norm precedes the product: then `add_product` writes them, or `embed`.
        follows: With `is_normed`, the matrix of that `add_product`; None for `embed`, which takes any.
    """
    assert 0 < rows <= MAX_ROWS
    is_vector = rows == 1 and not exact_rows
    matrix = weight.words if is_vector else view_elements(weight.words, weight.kind)
    per_word = WEIGHTS_PER_WORD[weight.kind] if matrix.dtype == torch.int32 else 1
    planes = matrix.new_zeros(rows, per_word, matrix.shape[1], dtype=torch.float32 if is_vector else dtype)
    parts = 1 if follows is None else count_programs(follows, rows, exact_rows=exact_rows)
    squares = planes.new_zeros(rows, parts, dtype=torch.float32) if is_normed else None
    return Inputs(planes, weight.kind, is_vector, squares)


def embed(x: Tensor, inputs: Inputs, norm_weight: Tensor, tokens: Tensor, weight: PackedWeight | Tensor) -> None:
    """Begin a step: write the tokens' rows of an embedding to x, and with a norm's gains to the first product's inputs.

    It starts when all before it is done, as what comes before a step may be no kernel.

    Args:
        x: (M, E) in the activations' dtype.
        inputs: Those of a product with E inputs, `is_normed`.
        norm_weight: (E,) of any float dtype.
        tokens: (M,) int64, below V.
        weight: (V, E), packed or a tensor of floats.
    """
    from gptfast.kernels.cuda import fused as kernels

    assert inputs.squares is not None
    if isinstance(weight, Tensor):
        constants: dict[str, Any] = {"W": weight.shape[1], "G": 1, "P": 1, "kind": "bf16", "zero": 0}
        matrix, scales, mins = weight, None, None
    else:
        matrix, scales, mins = view_elements(weight.words, weight.kind), weight.scales, weight.mins
        constants = list_constants(weight.kind, matrix, scales, mins, Configuration(1, EMBEDDING_WORDS, 1))
        del constants["even_rows"], constants["block_rows"], constants["block_words"]
    with select_device(x):
        kernels.embed[(x.shape[0],)](
            x,
            inputs.planes,
            inputs.squares,
            norm_weight,
            tokens,
            matrix,
            scales,
            mins,
            x.shape[1],
            parts=inputs.squares.shape[1],
            **inputs.layout,
            **constants,
            is_vector=inputs.is_vector,
            block_words=EMBEDDING_WORDS,
            **describe_launch(EMBEDDING_WARPS, 1, pdl=False),
        )


def project_qkv(
    q: Tensor,
    inputs: Inputs,
    eps: float,
    weight: PackedWeight,
    bias: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    input_pos: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    pdl: bool,
) -> None:
    """RMSNorm's division, wqkv, rotary embedding; queries to `q`, keys and values to the slots `input_pos`.

    Args:
        q: (B, S, H, D) in the activations' dtype.
        inputs: (M, ...) `is_normed`.
        eps: Of the norm.
        weight: ((H + 2 * K) * D, E), the rows of queries, keys and values in this order.
        bias: ((H + 2 * K) * D,) or None.
        cos: (L or more, D / 2) float32.
        sin: The same.
        input_pos: (S,) int64, below L.
        k_cache: (B or more, K, L, D) of any float dtype; the first B rows are written.
        v_cache: The same.
        pdl: See the module.
    """
    from gptfast.kernels.cuda import fused as kernels

    batch, tokens, heads, dim = q.shape
    kv_heads, slots = k_cache.shape[1:3]
    assert weight.shape[0] == (heads + 2 * kv_heads) * dim
    assert inputs.planes.shape[0] == batch * tokens
    assert k_cache.shape[0] >= batch
    assert all(tensor.is_contiguous() for tensor in (q, cos, sin, k_cache, v_cache))
    programs, arguments = describe_product(inputs, weight, pdl=pdl)
    with select_device(q):
        kernels.project_qkv[(programs,)](
            q=q,
            k_cache=k_cache,
            v_cache=v_cache,
            squares=inputs.squares,
            bias=bias,
            cos=cos,
            sin=sin,
            input_pos=input_pos,
            S=tokens,
            L=slots,
            H=heads,
            K=kv_heads,
            D=dim,
            has_batch=batch > 1,
            **describe_norm(inputs, weight, eps),
            **arguments,
        )


def add_product(
    x: Tensor,
    following: Inputs,
    norm_weight: Tensor,
    inputs: Inputs,
    weight: PackedWeight,
    bias: Tensor | None,
    *,
    pdl: bool,
) -> None:
    """Add a product to the residual stream, and write the inputs of the one that follows the next norm.

    Args:
        x: (M, E) in the activations' dtype, changed in place.
        following: Those of the product after, made with `follows=weight`.
        norm_weight: (E,) the gains of the norm between, of any float dtype.
        inputs: (M, ...) not normed: of wo what attention leaves, of w2 what `project_swiglu` does.
        weight: (E, K).
        bias: (E,) or None.
        pdl: See the module.
    """
    from gptfast.kernels.cuda import fused as kernels

    assert following.squares is not None
    assert following.is_vector == inputs.is_vector
    assert x.shape == (inputs.planes.shape[0], weight.shape[0])
    assert x.is_contiguous()
    programs, arguments = describe_product(inputs, weight, pdl=pdl)
    assert following.squares.shape[1] == programs
    with select_device(x):
        kernels.add_product[(programs,)](
            x=x,
            next_planes=following.planes,
            next_squares=following.squares,
            gains=norm_weight,
            bias=bias,
            N=x.shape[1],
            **following.layout,
            **arguments,
        )


def project_swiglu(out: Inputs, inputs: Inputs, eps: float, weight: PackedWeight, *, pdl: bool) -> None:
    """RMSNorm's division, w13 and SwiGLU, to the inputs of w2.

    Args:
        out: (M, ...) those of a product with F inputs.
        inputs: (M, ...) `is_normed`.
        eps: Of the norm.
        weight: (2 * F, E), the gates' rows first.
        pdl: See the module.
    """
    from gptfast.kernels.cuda import fused as kernels

    assert out.is_vector == inputs.is_vector
    programs, arguments = describe_product(inputs, weight, pdl=pdl)
    with select_device(inputs.planes):
        kernels.project_swiglu[(programs,)](
            next_planes=out.planes,
            squares=inputs.squares,
            F=weight.shape[0] // 2,
            **out.layout,
            **describe_norm(inputs, weight, eps),
            **arguments,
        )


def project_head(logits: Tensor, inputs: Inputs, eps: float, weight: PackedWeight, *, pdl: bool) -> None:
    """RMSNorm's division and the output layer.

    Args:
        logits: (M, V) float32.
        inputs: (M, ...) `is_normed`.
        eps: Of the norm.
        weight: (V, E).
        pdl: See the module.
    """
    from gptfast.kernels.cuda import fused as kernels

    assert logits.shape == (inputs.planes.shape[0], weight.shape[0])
    assert logits.is_contiguous()
    programs, arguments = describe_product(inputs, weight, pdl=pdl)
    with select_device(logits):
        kernels.project_head[(programs,)](
            logits=logits,
            squares=inputs.squares,
            N=logits.shape[1],
            **describe_norm(inputs, weight, eps),
            **arguments,
        )


def choose(weight: PackedWeight, rows: int, *, exact_rows: bool) -> Configuration:
    """How a product is cut into programs."""
    chosen = find_configuration(rows, weight.words, weight.scales, weight.kind, exact_rows=exact_rows)
    if rows == 1 and not exact_rows and weight.words.shape[1] > chosen.block_words:
        words = max(LOAD_WORDS, AHEAD // WEIGHTS_PER_WORD[weight.kind]) * THREADS * chosen.warps
        return dataclasses.replace(chosen, block_words=min(chosen.block_words, words))
    return chosen


def count_programs(weight: PackedWeight, rows: int, *, exact_rows: bool) -> int:
    """Programs that a product is cut into."""
    return -(-weight.shape[0] // choose(weight, rows, exact_rows=exact_rows).block_rows)


def describe_norm(inputs: Inputs, weight: PackedWeight, eps: float) -> dict[str, Any]:
    """What a kernel is told that divides by the norm."""
    assert inputs.squares is not None
    return {"E": weight.in_features, "eps": eps, "parts": inputs.squares.shape[1]}


def describe_product(inputs: Inputs, weight: PackedWeight, *, pdl: bool) -> tuple[int, dict[str, Any]]:
    """The programs of a product, and the arguments that all kernels have, with the options of their launch."""
    from gptfast.kernels.cuda import linear

    planes = inputs.planes
    matrix = weight.words if inputs.is_vector else view_elements(weight.words, weight.kind)
    assert planes.is_contiguous()
    assert planes.shape[1] * planes.shape[2] == weight.width
    assert inputs.kind == weight.kind
    configuration = choose(weight, planes.shape[0], exact_rows=not inputs.is_vector)
    stages = 1 if inputs.is_vector else count_stages(configuration, planes.dtype)
    arguments = {
        "planes": planes,
        "words": matrix,
        "scales": weight.scales,
        "mins": weight.mins,
        "M": planes.shape[0],
        "magic": linear.MAGIC,
        **list_constants(weight.kind, matrix, weight.scales, weight.mins, configuration),
        "operand": None if inputs.is_vector else linear.get_operand(str(planes.dtype).removeprefix("torch.")),
        "is_vector": inputs.is_vector,
        "splits": configuration.splits,
        "pdl": pdl,
        **describe_launch(configuration.warps, stages, pdl=pdl),
    }
    return -(-weight.shape[0] // configuration.block_rows), arguments


def describe_launch(warps: int, stages: int, *, pdl: bool) -> dict[str, Any]:
    """The options of a launch."""
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    return options | {"launch_pdl": True} if pdl else options
