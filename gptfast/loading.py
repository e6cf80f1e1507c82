"""From a checkpoint to a model in memory: built on `meta`, filled matrix by matrix, checked strictly."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from gptfast.checkpoint.base import DTYPE_NAMES, Checkpoint, check_tensor
from gptfast.checkpoint.shapes import list_tensor_shapes
from gptfast.errors import CheckpointError
from gptfast.kernels import ops
from gptfast.kernels.packing import can_pack, pack
from gptfast.linear import PackedEmbedding, PackedLinear, PackedMatrix
from gptfast.model import FUSED_PROJECTIONS, Transformer, describe_dtype
from gptfast.quantization import QuantizedWeight, WeightScheme, join_rows

logger = logging.getLogger(__name__)

EMBEDDING = "tok_embeddings.weight"
HEAD = "output.weight"

Weights = Literal["stored", "fp32", "bf16", "int8", "int4"]
"""What to decode from: what the checkpoint holds, or that expanded to floats or rounded to integers."""
WEIGHTS: tuple[Weights, ...] = get_args(Weights)
DENSE_WEIGHTS = {"fp32": torch.float32, "bf16": torch.bfloat16}
HEAD_SCHEME = WeightScheme(bits=8, group_size=None)
ROUNDED_WEIGHTS = {"int8": HEAD_SCHEME, "int4": WeightScheme(bits=4, group_size=32)}
"""How blocks are rounded in memory; the output layer always is by `HEAD_SCHEME`."""

Matrix = tuple[Tensor | QuantizedWeight, str]
"""A matrix and the name of its precision."""


def load_model(
    checkpoint: Checkpoint,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    weights: Weights = "stored",
    rounds_inputs: bool = False,
) -> Transformer:
    """Build the model on `device`, in evaluation mode, with activations in `dtype`.

    On a CPU matrices are packed for its kernels in the precision that `weights` asks for, and `rounds_inputs` has the
    quantized ones multiplied with activations that are rounded to int8. Elsewhere, or where the kernels cannot be
    built, they are expanded to `dtype`, and one that is stored in it stays a view of the mapped file. Raises
    CheckpointError if a tensor is missing, unknown or of another shape than the config asks for.
    """
    shapes = list_tensor_shapes(checkpoint.config)
    aliases = check_names(checkpoint, set(shapes))
    with torch.device("meta"):
        model = Transformer(checkpoint.config)
    device = torch.device(device)
    model.uses_attention_kernel = packs = device.type == "cpu" and ops.has_cpu_kernels()
    expanded: set[str] = set()
    for name, parameter in list(model.named_parameters()):
        sources = {aliases.get(source, source): shapes[source] for source in list_sources(name)}
        module_name, _, kind = name.rpartition(".")
        if not (packs and parameter.dim() == 2):
            weight = _read_parameter(checkpoint, sources, parameter.shape, device, dtype, weights)
            setattr(model.get_submodule(module_name), kind, nn.Parameter(weight, requires_grad=False))
            continue
        matrices = [_read_matrix(checkpoint, source, shape, dtype, weights) for source, shape in sources.items()]
        rounds = rounds_inputs and any(isinstance(matrix, QuantizedWeight) for matrix, _ in matrices)
        parts = [pack_matrix(matrix) for matrix in join_alike(matrices)]
        module: nn.Module = (
            PackedEmbedding(parts[0], dtype=dtype, rounds_inputs=rounds)
            if name == EMBEDDING
            else PackedLinear(parts, rounds_inputs=rounds)
        )
        model.set_submodule(module_name, module)
        stored_types = [checkpoint.describe_type(source) for source in sources]
        for stored, (_, precision) in zip(stored_types, matrices, strict=True):
            if weights == "stored" and precision != stored and stored not in DTYPE_NAMES.values():
                expanded.add(stored)
    if expanded:
        names = ", ".join(sorted(expanded))
        logger.info("weights stored as %s have no kernel and are expanded to %s", names, describe_dtype(dtype))
    return model.eval()


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


def pack_matrix(matrix: Matrix) -> PackedMatrix:
    """Bring a matrix into the layout of the kernels."""
    weight, precision = matrix
    rows, columns = weight.shape
    return PackedMatrix(pack(weight), (rows, columns), precision)


def choose_scheme(checkpoint: Checkpoint, name: str, weights: Weights) -> WeightScheme | None:
    """How a matrix is rounded in memory; None if it is not, as an embedding that only rows are read of."""
    if weights not in ROUNDED_WEIGHTS:
        return None
    if name == HEAD or (name == EMBEDDING and checkpoint.config.tie_word_embeddings):
        return HEAD_SCHEME
    return None if name == EMBEDDING else ROUNDED_WEIGHTS[weights]


def _read_matrix(
    checkpoint: Checkpoint, source: str, shape: tuple[int, ...], dtype: torch.dtype, weights: Weights
) -> Matrix:
    """The matrix in the precision that `weights` asks for, as a view of the file where it lies there so."""
    scheme = choose_scheme(checkpoint, source, weights)
    if scheme is not None:
        if shape[1] % (scheme.group_size or 1):
            scheme = HEAD_SCHEME
        return checkpoint.read_rounded(source, scheme), scheme.describe()
    stored = checkpoint.describe_type(source)
    if weights not in DENSE_WEIGHTS:
        quantized = checkpoint.read_quantized(source)
        if quantized is not None and can_pack(quantized):
            return quantized, stored
        if stored in DTYPE_NAMES.values():
            dtype = next(each for each, name in DTYPE_NAMES.items() if name == stored)
    else:
        dtype = DENSE_WEIGHTS[weights]
    dense = _read_dense(checkpoint, {source: shape}, torch.Size(shape), torch.device("cpu"), dtype)
    return dense, describe_dtype(dtype)


def estimate_weight_bytes(checkpoint: Checkpoint, weights: Weights, dtype: torch.dtype, device: torch.device) -> int:
    """About how much memory `load_model` will take for the weights."""
    parameters = sum(math.prod(shape) for shape in list_tensor_shapes(checkpoint.config).values())
    if device.type != "cpu" or not ops.has_cpu_kernels():
        return parameters * dtype.itemsize
    if weights == "stored":
        return checkpoint.stored_bytes
    if weights in DENSE_WEIGHTS:
        return parameters * DENSE_WEIGHTS[weights].itemsize
    return parameters * ROUNDED_WEIGHTS[weights].bits // 8


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
    matrices = [_read_matrix(checkpoint, source, part, dtype, weights)[0] for source, part in sources.items()]
    values = [matrix if isinstance(matrix, Tensor) else matrix.dequantize() for matrix in matrices]
    return torch.cat(values).to(device, dtype)


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
            return view.contiguous()
    weight = torch.empty(shape, dtype=dtype, device=device)
    parts = torch.split(weight, [source_shape[0] for source_shape in sources.values()])
    for source, part in zip(sources, parts, strict=True):
        checkpoint.read_into(source, part)
    return weight
