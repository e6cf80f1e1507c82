"""From a checkpoint to a model in memory: built on `meta`, filled matrix by matrix, checked strictly."""

from __future__ import annotations

import itertools
import logging
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Literal, TypeGuard, get_args

import torch
from torch import Tensor, nn

from gptfast.checkpoint.base import DENSE_DTYPES, EXPANDED_AT_ONCE, Checkpoint, check_finite, check_tensor
from gptfast.checkpoint.shapes import list_tensor_shapes
from gptfast.errors import CheckpointError, UserError
from gptfast.kernels import packing as cpu_packing
from gptfast.kernels.cuda import packing as cuda_packing
from gptfast.kernels.cuda import tinygemm
from gptfast.kernels.ops import Kernels, are_for_cuda, choose_kernels
from gptfast.linear import (
    InductorMatrix,
    PackedEmbedding,
    PackedLinear,
    PackedMatrix,
    TinygemmMatrix,
    TritonEmbedding,
    TritonLinear,
    TritonMatrix,
)
from gptfast.memory import get_available_memory
from gptfast.model import FUSED_PROJECTIONS, Transformer, describe_dtype
from gptfast.quantization import FLOAT8, QuantizedWeight, WeightScheme, join_rows, slice_rows

logger = logging.getLogger(__name__)

EMBEDDING = "tok_embeddings.weight"
HEAD = "output.weight"

Weights = Literal["stored", "fp32", "bf16", "fp8", "int8", "int4"]
"""What to decode from: what the checkpoint holds, or that expanded to floats or rounded."""
WEIGHTS: tuple[Weights, ...] = get_args(Weights)
DENSE_WEIGHTS = {"fp32": torch.float32, "bf16": torch.bfloat16}
HEAD_SCHEME = WeightScheme(bits=8, group_size=None)
ROUNDED_WEIGHTS = {"fp8": FLOAT8, "int8": HEAD_SCHEME, "int4": WeightScheme(bits=4, group_size=32)}
"""How blocks are rounded in memory; the output layer always is by `HEAD_SCHEME`.

With fp8 too: SmolLM2-135M's KL from bfloat16 is 0.021 so, and 0.048 with an output layer of fp8 (4096 tokens, standard
errors below 0.001, two cores of an AMD EPYC, 2026-12-01), for the same bytes.
"""

STORED_BITS = {
    "F32": 32,
    "F16": 16,
    "BF16": 16,
    "Q4_0": 4.5,
    "Q4_1": 5,
    "Q4_K": 4.625,
    "Q6_K": 6.5625,
    "Q8_0": 8.5,
    "int4": 4.5,
    "int8": 8,
    "fp8": 8,
}
"""Of a weight in a packed matrix, with its scales, by the first word of how it is stored."""
TINYGEMM_BITS = 5
"""Of a weight of int4 in groups of 32 with their scales and zeros in torchao's layout; larger groups take less."""

Matrix = tuple[Tensor | QuantizedWeight, str]
"""A matrix and the name of its precision."""


def load_model(
    checkpoint: Checkpoint,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    weights: Weights = "stored",
    rounds_inputs: bool = False,
    exact_rows: bool = False,
    kernels: Kernels | Literal["auto"] | None = "auto",
) -> Transformer:
    """Build the model on `device`, in evaluation mode, with activations in `dtype`.

    Matrices are packed for the device's kernels in the precision that `weights` asks for. Where there are none, they
    are expanded to `dtype`, and one that is stored in it stays a view of the mapped file.

    Args:
        checkpoint: what to load.
        device: where to.
        dtype: of activations and norms.
        weights: what to decode from.
        rounds_inputs: on a CPU, have quantized matrices multiplied with activations that are rounded to int8.
        exact_rows: on CUDA, have a row's product be the same to the bit alone and among up to 16; the CPU's always is.
        kernels: what to run on; `auto` for the device's. `inductor` has matrices of floats multiplied in `dtype` by
            torch's own operators. `torchao` has int4, and the rest is as with `triton`.

    Raises:
        CheckpointError: a tensor is missing, unknown or of another shape than the config asks for.
        UserError: the kernels do not multiply a matrix of its precision.
    """
    shapes = list_tensor_shapes(checkpoint.config)
    aliases = check_names(checkpoint, set(shapes))
    with torch.device("meta"):
        model = Transformer(checkpoint.config)
    device = torch.device(device)
    if kernels == "auto":
        kernels = choose_kernels(device)
    if kernels == "torchao":
        check_has_int4(checkpoint, weights)
    model.set_kernels(kernels)
    remarks: dict[str, set[str]] = defaultdict(set)
    for name, parameter in list(model.named_parameters()):
        sources = {aliases.get(source, source): shapes[source] for source in list_sources(name)}
        module_name, _, kind = name.rpartition(".")
        matrices = []
        if parameter.dim() == 2 and kernels is not None:
            matrices = [
                _read_matrix(checkpoint, source, shape, dtype, weights, kernels) for source, shape in sources.items()
            ]
        if not can_pack_all(kernels, [matrix for matrix, _ in matrices]):
            weight = (
                expand([matrix for matrix, _ in matrices], device, dtype)
                if matrices
                else _read_parameter(checkpoint, sources, parameter.shape, device, dtype, weights)
            )
            for source, shape in sources.items():
                scheme = choose_scheme(checkpoint, source, shape[-1], weights) if parameter.dim() == 2 else None
                if scheme is not None:
                    add_remark(remarks, checkpoint, source, scheme, scheme.describe(), weights)
            setattr(model.get_submodule(module_name), kind, nn.Parameter(weight, requires_grad=False))
            continue
        is_embedding = name == EMBEDDING
        if not is_embedding or checkpoint.config.tie_word_embeddings:
            for source, (matrix, precision) in zip(sources, matrices, strict=True):
                check_product(kernels, source, matrix, precision)
        if are_for_cuda(kernels):
            module = make_for_cuda(join_alike(matrices), device, dtype, is_embedding, exact_rows, kernels)
        else:
            module = make_for_cpu(join_alike(matrices), dtype, is_embedding, rounds_inputs)
        model.set_submodule(module_name, module)
        for (source, shape), (matrix, precision) in zip(sources.items(), matrices, strict=True):
            scheme = choose_scheme(checkpoint, source, shape[1], weights)
            add_remark(remarks, checkpoint, source, scheme, precision, weights)
            if uses_tinygemm(matrix, kernels, is_embedding) and not tinygemm.is_exact(matrix):
                remarks["have scales and zeros rounded to bfloat16, which torchao's kernel takes"].add(precision)
    for remark, types in remarks.items():
        logger.info("weights stored as %s %s", ", ".join(sorted(types)), remark)
    return model.eval()


def add_remark(
    remarks: dict[str, set[str]],
    checkpoint: Checkpoint,
    name: str,
    scheme: WeightScheme | None,
    precision: str,
    weights: Weights,
) -> None:
    """Note for a matrix what `remark_on` says, by what is said, with the type that it is stored in."""
    stored = checkpoint.describe_type(name)
    remark = remark_on(name, stored, scheme, precision, weights)
    if remark is not None:
        remarks[remark].add(stored)


def remark_on(name: str, stored: str, scheme: WeightScheme | None, precision: str, weights: Weights) -> str | None:
    """What a user should know of a matrix that is held in another precision than it is stored in or asked for.

    `scheme` is that by which it is to be rounded.
    """
    asked = stored if scheme is None else scheme.describe()
    if stored == asked:
        has_kernel = stored in DENSE_DTYPES or weights in DENSE_WEIGHTS or precision == stored
        return None if has_kernel else f"have no kernel and are expanded to {precision}"
    expanded = "" if precision == asked else f", and expanded to {precision} as that has no kernel here"
    if stored not in DENSE_DTYPES:
        return f"are rounded a second time, to {asked}, which costs accuracy{expanded}"
    if expanded:
        return f"are rounded to {asked}{expanded}"
    if weights == "int4" and precision == HEAD_SCHEME.describe() and name not in (EMBEDDING, HEAD):
        return f"are rounded to {precision} where groups do not divide them"
    return None


def join_alike(matrices: Sequence[Matrix]) -> list[Matrix]:
    """Neighbours that are held alike made into one, so that their product is one too."""
    joined: list[Matrix] = []
    for _, group in itertools.groupby(matrices, key=describe_form):
        alike = list(group)
        dense = [weight for weight, _ in alike if isinstance(weight, Tensor)]
        quantized = [weight for weight, _ in alike if isinstance(weight, QuantizedWeight)]
        if len(alike) > 1:
            joined.append((torch.cat(dense) if dense else join_rows(quantized), alike[0][1]))
        else:
            joined += alike
    return joined


def describe_form(matrix: Matrix) -> tuple[object, ...]:
    """What two matrices must have in common to be one."""
    weight, precision = matrix
    if isinstance(weight, Tensor):
        return precision, weight.dtype
    present = tuple(name for name, value in weight.list_tensors().items() if value is not None)
    return precision, weight.bits, weight.group_size, present


def can_pack_all(kernels: Kernels | None, matrices: Sequence[Tensor | QuantizedWeight]) -> bool:
    """Whether a layer of these matrices is a packed one; if not, it is torch's own, and there may be no matrices."""
    if kernels == "inductor" and all(isinstance(matrix, Tensor) for matrix in matrices):
        return False
    return bool(matrices) and all(can_pack(kernels, matrix) for matrix in matrices)


def can_pack(kernels: Kernels | None, weight: Tensor | QuantizedWeight) -> bool:
    """Whether the kernels have its dtype, or its groups."""
    if are_for_cuda(kernels):
        return cuda_packing.can_pack(weight)
    return isinstance(weight, Tensor) or cpu_packing.can_pack(weight)


def make_for_cpu(matrices: Sequence[Matrix], dtype: torch.dtype, is_embedding: bool, rounds_inputs: bool) -> nn.Module:
    """A layer of packed matrices; only quantized ones have their inputs rounded."""
    parts = []
    for weight, precision in matrices:
        rows, columns = weight.shape
        parts.append(PackedMatrix(cpu_packing.pack(weight), (rows, columns), precision))
    rounds = rounds_inputs and any(isinstance(weight, QuantizedWeight) for weight, _ in matrices)
    if is_embedding:
        return PackedEmbedding(parts[0], dtype=dtype, rounds_inputs=rounds)
    return PackedLinear(parts, rounds_inputs=rounds)


def make_for_cuda(
    matrices: Sequence[Matrix],
    device: torch.device,
    dtype: torch.dtype,
    is_embedding: bool,
    exact_rows: bool,
    kernels: Kernels | None,
) -> nn.Module:
    """A layer of matrices that are packed on the device."""
    make_matrix = InductorMatrix if kernels == "inductor" else TritonMatrix
    if is_embedding:
        [(weight, precision)] = matrices
        matrix = make_matrix(cuda_packing.pack(weight.to(device)), precision)
        return TritonEmbedding(matrix, dtype=dtype, exact_rows=exact_rows)
    parts = [
        TinygemmMatrix(tinygemm.pack(weight.to(device)), precision)
        if uses_tinygemm(weight, kernels, is_embedding)
        else make_matrix(cuda_packing.pack(weight.to(device)), precision)
        for weight, precision in matrices
    ]
    return TritonLinear(parts, exact_rows=exact_rows)


def uses_tinygemm(
    weight: Tensor | QuantizedWeight, kernels: Kernels | None, is_embedding: bool
) -> TypeGuard[QuantizedWeight]:
    """Whether a matrix is in torchao's layout, from which no rows can be read for an embedding."""
    return kernels == "torchao" and isinstance(weight, QuantizedWeight) and weight.bits == 4 and not is_embedding


def check_has_int4(checkpoint: Checkpoint, weights: Weights) -> None:
    """Raise UserError if there is nothing for torchao's kernel to multiply."""
    stored = [checkpoint.describe_type(name) for name in checkpoint.names()] if weights == "stored" else [weights]
    if not any(name.startswith(("int4", "Q4_")) for name in stored):
        raise UserError("kernels torchao have int4 alone, and no matrix is of it; add --weights int4, or use triton")


def check_product(kernels: Kernels | None, name: str, weight: Tensor | QuantizedWeight, precision: str) -> None:
    """Raise UserError for a matrix that the kernels asked for do not multiply."""
    if isinstance(weight, Tensor):
        return
    if kernels == "inductor" and (weight.bits == 4 or weight.is_float):
        others = "triton or torchao" if weight.bits == 4 else "triton"
        raise UserError(
            f"kernels inductor are for dense weights and int8, and {name} is of {precision}; use {others} for it"
        )
    if kernels == "torchao" and weight.bits == 4 and name != EMBEDDING:
        reason = tinygemm.explain_refusal(weight)
        if reason is not None:
            raise UserError(f"kernels torchao cannot hold {name}: {reason}; use triton")


def choose_scheme(checkpoint: Checkpoint, name: str, columns: int, weights: Weights) -> WeightScheme | None:
    """How a matrix of so many columns is rounded in memory; None if it is not, as an embedding only rows are read of.

    One that groups do not divide has 8 bits and a scale per channel.
    """
    if weights not in ROUNDED_WEIGHTS:
        return None
    if name == HEAD or (name == EMBEDDING and checkpoint.config.tie_word_embeddings):
        return HEAD_SCHEME
    if name == EMBEDDING:
        return None
    scheme = ROUNDED_WEIGHTS[weights]
    return HEAD_SCHEME if columns % (scheme.group_size or 1) else scheme


def _read_matrix(
    checkpoint: Checkpoint,
    source: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    weights: Weights,
    kernels: Kernels | None,
) -> Matrix:
    """The matrix in the precision that `weights` asks for, as a view of the file where it lies there so."""
    scheme = choose_scheme(checkpoint, source, shape[1], weights)
    stored = checkpoint.describe_type(source)
    if scheme is not None and scheme.describe() != stored:
        rounded = checkpoint.read_rounded(source, shape, scheme)
        if kernels is None or can_pack(kernels, rounded):
            return rounded, scheme.describe()
        return expand([rounded], torch.device("cpu"), dtype), describe_dtype(dtype)
    if weights not in DENSE_WEIGHTS:
        quantized = checkpoint.read_quantized(source)
        if quantized is not None and can_pack(kernels, quantized):
            for values in quantized.list_tensors().values():
                if values is not None and values.is_floating_point():
                    check_finite(checkpoint.path, source, values)
            return quantized, stored
        wanted = DENSE_DTYPES.get(stored, dtype)
    else:
        wanted = DENSE_WEIGHTS[weights]
    # The Triton kernels have no matrices of float32.
    if not are_for_cuda(kernels) or wanted in cuda_packing.KINDS:
        dtype = wanted
    dense = _read_dense(checkpoint, {source: shape}, torch.Size(shape), torch.device("cpu"), dtype)
    return dense, describe_dtype(dtype)


def estimate_weight_bytes(
    checkpoint: Checkpoint,
    weights: Weights,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels | Literal["auto"] | None = "auto",
) -> int:
    """About how much memory `load_model` will take for the weights."""
    if kernels == "auto":
        kernels = choose_kernels(device)
    bits, names = 0.0, checkpoint.names()
    for name, shape in list_tensor_shapes(checkpoint.config).items():
        each = 8.0 * dtype.itemsize
        if kernels is not None and len(shape) == 2:
            scheme = choose_scheme(checkpoint, name, shape[1], weights)
            stored = checkpoint.describe_type(name) if name in names else ""
            kind = (stored if scheme is None else scheme.describe()).partition(" ")[0]
            floats = DENSE_WEIGHTS.get(weights, DENSE_DTYPES.get(stored)) if scheme is None else None
            if floats is None and (kind != "fp8" or are_for_cuda(kernels)):
                each = STORED_BITS.get(kind, each)
            elif floats is not None and (kernels == "cpp" or (kernels != "inductor" and floats in cuda_packing.KINDS)):
                each = 8.0 * floats.itemsize
            if kernels == "torchao" and each < TINYGEMM_BITS:
                each = TINYGEMM_BITS
        bits += math.prod(shape) * each
    return int(bits / 8)


def check_memory(
    checkpoint: Checkpoint,
    weights: Weights,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels | Literal["auto"] | None = "auto",
) -> None:
    """Raise UserError if the weights are larger than the memory that is free for them."""
    needed = estimate_weight_bytes(checkpoint, weights, dtype, device, kernels)
    free = get_available_memory(device)
    if free is not None and needed > free:
        raise UserError(
            f"the weights of {checkpoint.path} take {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free on "
            f"{device.type}; use a smaller model{'' if weights == 'int4' else ' or --weights int4'}"
        )


def list_sources(name: str) -> list[str]:
    """The checkpoint's tensors that a parameter of the model is made of, in the order of its rows."""
    *prefix, module, kind = name.split(".")
    parts = FUSED_PROJECTIONS.get(module, (module,))
    return [".".join([*prefix, part, kind]) for part in parts]


def check_names(checkpoint: Checkpoint, expected: set[str]) -> dict[str, str]:
    """Compare the tensors there are with the `expected` ones; raise CheckpointError on a difference.

    Returns by which other name a tensor goes: with a tied head, either name may stand for both.
    """
    found = set(checkpoint.names())
    aliases: dict[str, str] = {}
    if checkpoint.config.tie_word_embeddings and HEAD in found:
        if EMBEDDING not in found:
            aliases[EMBEDDING] = HEAD
            found.add(EMBEDDING)
        elif not torch.equal(checkpoint.read(EMBEDDING), checkpoint.read(HEAD)):
            raise CheckpointError(
                f"the config of {checkpoint.path} ties {HEAD} to {EMBEDDING} but they differ; "
                "set tie_word_embeddings to false"
            )
        found.remove(HEAD)
    for problem, names in (("lacks", expected - found), ("has the unknown", found - expected)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise CheckpointError(
                f"{checkpoint.path} {problem} tensor {min(names)}{more} for its architecture "
                f"{checkpoint.config.architecture}; it is incomplete or of another architecture"
            )
    return aliases


def _read_parameter(
    checkpoint: Checkpoint,
    sources: dict[str, tuple[int, ...]],
    shape: torch.Size,
    device: torch.device,
    dtype: torch.dtype,
    weights: Weights,
) -> Tensor:
    """A parameter in `dtype`, with the values that it has in the precision that `weights` asks for."""
    if len(shape) == 1 or weights in ("stored", "fp32"):
        return _read_dense(checkpoint, sources, shape, device, dtype)
    matrices = [_read_matrix(checkpoint, source, part, dtype, weights, None)[0] for source, part in sources.items()]
    return expand(matrices, device, dtype)


def expand(matrices: Sequence[Tensor | QuantizedWeight], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Their rows below each other as one dense matrix."""
    weight = torch.empty(sum(matrix.shape[0] for matrix in matrices), matrices[0].shape[1], dtype=dtype, device=device)
    parts = torch.split(weight, [matrix.shape[0] for matrix in matrices])
    for matrix, part in zip(matrices, parts, strict=True):
        for rows in slice_rows(tuple(part.shape), EXPANDED_AT_ONCE):
            part[rows] = matrix[rows] if isinstance(matrix, Tensor) else matrix.select_rows(rows).dequantize()
    return weight


def _read_dense(
    checkpoint: Checkpoint,
    sources: dict[str, tuple[int, ...]],
    shape: torch.Size,
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    """The parameter of that shape, made of the checkpoint's tensors `sources`, which are given with their shapes."""
    if len(sources) == 1 and device.type == "cpu":
        [source] = sources
        view = checkpoint.view(source)
        if view is not None and view.dtype == dtype:
            check_tensor(checkpoint.path, source, view, tuple(shape))
            check_finite(checkpoint.path, source, view)
            return view.contiguous()
    weight = torch.empty(shape, dtype=dtype, device=device)
    parts = torch.split(weight, [source_shape[0] for source_shape in sources.values()])
    for source, part in zip(sources, parts, strict=True):
        checkpoint.read_into(source, part)
        check_finite(checkpoint.path, source, part)
    return weight
