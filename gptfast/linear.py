"""Embeddings and linear layers that are more than torch's own.

Dense weights are held by `nn.Linear` and `Embedding`. Packed ones are what kernels read, in whatever precision, those
of the CPU or, in Triton, of CUDA; the loader puts them in the place of the dense.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptfast.kernels import ops
from gptfast.kernels.cuda import ops as cuda_ops
from gptfast.kernels.cuda.packing import PackedWeight, unpack


class Embedding(nn.Embedding):
    """`nn.Embedding` that can be the model's output layer too."""

    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        # A weight of its own, as the default one's initialization imports all of torch.compile, for 1.4 s.
        super().__init__(num_embeddings, embedding_dim, _weight=torch.empty(num_embeddings, embedding_dim))

    def project(self, x: Tensor) -> Tensor:
        """(..., E) in, (..., V) out: the product with the embedding, of models that tie the two."""
        return F.linear(x, self.weight)


@dataclass(frozen=True)
class PackedMatrix:
    """What `gptfast.kernels.packing` makes of a matrix (out_features, in_features), and in which precision it holds it.

    `precision` is for reports: `bfloat16`, `Q4_1`, `int4 g32`.
    """

    packed: Tensor
    shape: tuple[int, int]
    precision: str


class PackedLinear(nn.Module):
    """The product with matrices that `gptfast.kernels.packing` packed.

    There are several where projections that read the same input are not stored alike; their outputs stand side by
    side. `rounds_inputs` has activations rounded to int8, for quantized matrices alone. `bias`, (sum of out_features,),
    may be set.
    """

    def __init__(self, parts: Sequence[PackedMatrix], *, rounds_inputs: bool) -> None:
        super().__init__()
        self.weight = nn.ParameterList(nn.Parameter(part.packed, requires_grad=False) for part in parts)
        self.sizes = [part.shape[0] for part in parts]
        self.precisions = [part.precision for part in parts]
        self.rounds_inputs = rounds_inputs
        self.bias: nn.Parameter | None = None

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) in, (..., out_features) out, in the activations' dtype."""
        if len(self.sizes) == 1:
            return self._multiply(x, self.weight[0], self.bias, self.sizes[0])
        biases = [None] * len(self.sizes) if self.bias is None else torch.split(self.bias, self.sizes)
        parts = zip(self.weight, biases, self.sizes, strict=True)
        return torch.cat([self._multiply(x, *part) for part in parts], dim=-1)

    def list_matrices(self) -> list[tuple[str, Tensor]]:
        """The packed matrices, each after its precision."""
        return list(zip(self.precisions, self.weight, strict=True))

    def _multiply(self, x: Tensor, packed: Tensor, bias: Tensor | None, size: int) -> Tensor:
        return ops.linear(x, packed, bias, out_features=size, rounds_inputs=self.rounds_inputs)

    def extra_repr(self) -> str:
        """What a compiled step depends on beside the parameters."""
        return f"{self.precisions}, sizes={self.sizes}, rounds_inputs={self.rounds_inputs}"


class PackedEmbedding(nn.Module):
    """An embedding (V, E) that is packed like a linear layer's matrix, so that it can be the output layer too."""

    def __init__(self, matrix: PackedMatrix, *, dtype: torch.dtype, rounds_inputs: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(matrix.packed, requires_grad=False)
        self.vocab_size, self.dim = matrix.shape
        self.precisions = [matrix.precision]
        self.dtype = dtype
        self.rounds_inputs = rounds_inputs

    def forward(self, tokens: Tensor) -> Tensor:
        """(...) int64 token ids in, (..., E) out, of `dtype`."""
        return ops.embedding(tokens, self.weight, dim=self.dim, dtype=self.dtype)

    def project(self, x: Tensor) -> Tensor:
        """(..., E) in, (..., V) out: the product with the embedding, of models that tie the two."""
        return ops.linear(x, self.weight, out_features=self.vocab_size, rounds_inputs=self.rounds_inputs)

    def list_matrices(self) -> list[tuple[str, Tensor]]:
        """The packed matrix after its precision."""
        return [(self.precisions[0], self.weight)]

    def extra_repr(self) -> str:
        """What a compiled step depends on beside the parameters."""
        return (
            f"{self.precisions}, {self.vocab_size}, {self.dim}, dtype={self.dtype}, rounds_inputs={self.rounds_inputs}"
        )


class TritonMatrix(nn.Module):
    """A matrix that `gptfast.kernels.cuda.packing` packed, as parameters; `precision` is for reports."""

    def __init__(self, packed: PackedWeight, precision: str) -> None:
        super().__init__()
        self.kind, self.in_features, self.precision = packed.kind, packed.in_features, precision
        for name in ("words", "scales", "mins"):
            value = getattr(packed, name)
            self.register_parameter(name, None if value is None else nn.Parameter(value, requires_grad=False))
        self.words: nn.Parameter
        self.scales: nn.Parameter | None
        self.mins: nn.Parameter | None

    @property
    def weight(self) -> PackedWeight:
        """What the operators take."""
        return PackedWeight(self.kind, self.words, self.in_features, self.scales, self.mins)

    def extra_repr(self) -> str:
        """What it holds."""
        return f"{self.precision}, {self.words.shape[0]}, {self.in_features}"


class TritonLinear(nn.Module):
    """`PackedLinear` on CUDA. With `exact_rows` a row's result is the same to the bit alone and among up to 16."""

    def __init__(self, parts: Sequence[TritonMatrix], *, exact_rows: bool) -> None:
        super().__init__()
        self.matrices: Sequence[TritonMatrix] = nn.ModuleList(parts)  # type: ignore[assignment]
        self.sizes = [part.words.shape[0] for part in parts]
        self.exact_rows = exact_rows
        self.bias: nn.Parameter | None = None

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) in, (..., out_features) out, in the activations' dtype."""
        biases = [None] * len(self.sizes) if self.bias is None else torch.split(self.bias, self.sizes)
        products = [
            cuda_ops.linear(x, part.weight, bias, exact_rows=self.exact_rows)
            for part, bias in zip(self.matrices, biases, strict=True)
        ]
        return products[0] if len(products) == 1 else torch.cat(products, dim=-1)

    def list_matrices(self) -> list[tuple[str, Tensor]]:
        """The packed matrices, each after its precision."""
        return [(part.precision, part.words) for part in self.matrices]


class TritonEmbedding(nn.Module):
    """`PackedEmbedding` on CUDA."""

    def __init__(self, matrix: TritonMatrix, *, dtype: torch.dtype, exact_rows: bool) -> None:
        super().__init__()
        self.matrix = matrix
        self.dtype = dtype
        self.exact_rows = exact_rows

    def forward(self, tokens: Tensor) -> Tensor:
        """(...) int64 token ids in, (..., E) out, of `dtype`."""
        rows = self.matrix.weight.select_rows(tokens.flatten())
        return unpack(rows).to(self.dtype).view(*tokens.shape, -1)

    def project(self, x: Tensor) -> Tensor:
        """(..., E) in, (..., V) out: the product with the embedding, of models that tie the two."""
        return cuda_ops.linear(x, self.matrix.weight, exact_rows=self.exact_rows)

    def list_matrices(self) -> list[tuple[str, Tensor]]:
        """The packed matrix after its precision."""
        return [(self.matrix.precision, self.matrix.words)]
