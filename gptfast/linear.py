"""Embeddings and linear layers that are more than torch's own.

Dense weights are held by `nn.Linear` and `Embedding`. Packed ones are what kernels read, in whatever precision, those
of the CPU or, in Triton, of CUDA; the loader puts them in the place of the dense. What else can multiply on CUDA is
here to compare Triton's with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptfast.kernels import ops
from gptfast.kernels.cuda import ops as cuda_ops
from gptfast.kernels.cuda import tinygemm
from gptfast.kernels.cuda.packing import PackedWeight, unpack
from gptfast.kernels.cuda.tinygemm import TinygemmWeight


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

    @property
    def out_features(self) -> int:
        """Its rows."""
        return self.words.shape[0]

    def multiply(self, x: Tensor, bias: Tensor | None = None, *, exact_rows: bool) -> Tensor:
        """(..., in_features) in, (..., out_features) out, in the activations' dtype."""
        return cuda_ops.linear(x, self.weight, bias, exact_rows=exact_rows)

    def extra_repr(self) -> str:
        """What it holds."""
        return f"{self.precision}, {self.out_features}, {self.in_features}"


class InductorMatrix(TritonMatrix):
    """A matrix of int8 or of two bytes whose product with one row is generated by torch.compile.

    For more rows, or without fusing, the compiler would write the whole matrix as floats, so that is left to Triton.
    """

    def multiply(self, x: Tensor, bias: Tensor | None = None, *, exact_rows: bool) -> Tensor:
        """See `TritonMatrix.multiply`; one row has other sums than among several, with `exact_rows` too."""
        if x.numel() != self.in_features or not torch.compiler.is_compiling():
            return super().multiply(x, bias, exact_rows=exact_rows)
        product = sum_products(x.flatten().float(), self.weight)
        if bias is not None:
            product = product + bias
        return product.to(x.dtype).view(*x.shape[:-1], -1)


def sum_products(x: Tensor, weight: PackedWeight) -> Tensor:
    """One row of activations (K,) float32 times a packed matrix (N, K): (N,) float32.

    It is written as the sum that max-autotune makes of a product with one row, so that every mode of torch.compile
    expands the matrix in the kernel that reads it. Of int8 with scales in bfloat16, a product may become the library's
    `_weight_int8pack_mm`, a naive kernel.
    """
    if weight.scales is None or weight.scales.shape[1] > 1 or weight.mins is not None:
        return (unpack(weight) * x).sum(-1)
    codes = unpack(PackedWeight(weight.kind, weight.words, weight.in_features))
    return (codes * x).sum(-1) * weight.scales[:, 0].float()


class TinygemmMatrix(nn.Module):
    """A matrix of int4 in the layout of torch's tinygemm kernel, which torchao calls; `precision` is for reports."""

    def __init__(self, packed: TinygemmWeight, precision: str) -> None:
        super().__init__()
        self.words = nn.Parameter(packed.words, requires_grad=False)
        self.scales_and_zeros = nn.Parameter(packed.scales_and_zeros, requires_grad=False)
        self.group_size, self.precision = packed.group_size, precision
        self.out_features, self.in_features = packed.shape

    def multiply(self, x: Tensor, bias: Tensor | None = None, *, exact_rows: bool) -> Tensor:
        """See `TritonMatrix.multiply`; in bfloat16 alone, and nothing is known of rows with `exact_rows`."""
        product = tinygemm.multiply(x, TinygemmWeight(self.words, self.scales_and_zeros, self.group_size))
        return product if bias is None else product + bias

    def extra_repr(self) -> str:
        """What it holds."""
        return f"{self.precision}, {self.out_features}, {self.in_features}, group_size={self.group_size}"


class TritonLinear(nn.Module):
    """`PackedLinear` on CUDA. With `exact_rows` a row's result is the same to the bit alone and among up to 16.

    That holds for the products of Triton; see the other matrices for theirs.
    """

    def __init__(self, parts: Sequence[TritonMatrix | TinygemmMatrix], *, exact_rows: bool) -> None:
        super().__init__()
        self.matrices: Sequence[TritonMatrix | TinygemmMatrix] = nn.ModuleList(parts)  # type: ignore[assignment]
        self.sizes = [part.out_features for part in parts]
        self.exact_rows = exact_rows
        self.bias: nn.Parameter | None = None

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) in, (..., out_features) out, in the activations' dtype."""
        biases = [None] * len(self.sizes) if self.bias is None else torch.split(self.bias, self.sizes)
        products = [
            part.multiply(x, bias, exact_rows=self.exact_rows) for part, bias in zip(self.matrices, biases, strict=True)
        ]
        return products[0] if len(products) == 1 else torch.cat(products, dim=-1)

    def list_matrices(self) -> list[tuple[str, Tensor]]:
        """The packed matrices, each after its precision."""
        return [(part.precision, part.words) for part in self.matrices]

    def list_packed(self) -> list[PackedWeight]:
        """The matrices that lie as the Triton kernels read them."""
        return [part.weight for part in self.matrices if isinstance(part, TritonMatrix)]


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
        return self.matrix.multiply(x, exact_rows=self.exact_rows)

    def list_matrices(self) -> list[tuple[str, Tensor]]:
        """The packed matrix after its precision."""
        return [(self.matrix.precision, self.matrix.words)]

    def list_packed(self) -> list[PackedWeight]:
        """The matrix, which lies as the Triton kernels read it."""
        return [self.matrix.weight]
