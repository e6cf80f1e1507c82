"""The products that a model is made of, found by loading one layer of each kind that it has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from gptfast.chat import ChatTemplate
from gptfast.checkpoint.base import Checkpoint
from gptfast.checkpoint.shapes import list_block_shapes
from gptfast.kernels.cuda.products import Format, find_format
from gptfast.linear import TritonEmbedding, TritonLinear
from gptfast.loading import Weights, load_model
from gptfast.quantization import QuantizedWeight, WeightScheme
from gptfast.tokenizer import Tokenizer

LAYER_NAME = re.compile(r"layers\.(\d+)\.(.+)")


class Outline(Checkpoint):
    """A checkpoint that lacks the layers whose tensors are stored as those of an earlier one.

    The layers that are left have numbers without gaps.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        names, block = checkpoint.names(), list_block_shapes(checkpoint.config)
        first: dict[tuple[str | None, ...], int] = {}
        for layer in range(checkpoint.config.n_layers):
            tensors = [f"layers.{layer}.{name}" for name in block]
            stored = tuple(checkpoint.describe_type(name) if name in names else None for name in tensors)
            first.setdefault(stored, layer)
        self._layers = list(first.values())
        self._numbers = {layer: number for number, layer in enumerate(self._layers)}
        self.path, self.generation = checkpoint.path, checkpoint.generation
        self.config = replace(checkpoint.config, n_layers=len(self._layers))
        self.stored_bytes = checkpoint.stored_bytes

    def names(self) -> frozenset[str]:
        """See `Checkpoint.names`."""
        return frozenset(name for name in map(self._rename, self._checkpoint.names()) if name is not None)

    def read(self, name: str) -> Tensor:
        """See `Checkpoint.read`."""
        return self._checkpoint.read(self._locate(name))

    def view(self, name: str) -> Tensor | None:
        """See `Checkpoint.view`."""
        return self._checkpoint.view(self._locate(name))

    def read_into(self, name: str, out: Tensor) -> None:
        """See `Checkpoint.read_into`."""
        self._checkpoint.read_into(self._locate(name), out)

    def iterate_rows(self, name: str, shape: tuple[int, ...]) -> Iterator[tuple[slice, Tensor]]:
        """See `Checkpoint.iterate_rows`."""
        return self._checkpoint.iterate_rows(self._locate(name), shape)

    def read_quantized(self, name: str) -> QuantizedWeight | None:
        """See `Checkpoint.read_quantized`."""
        return self._checkpoint.read_quantized(self._locate(name))

    def read_rounded(self, name: str, shape: tuple[int, ...], scheme: WeightScheme) -> QuantizedWeight:
        """See `Checkpoint.read_rounded`."""
        return self._checkpoint.read_rounded(self._locate(name), shape, scheme)

    def describe_type(self, name: str) -> str:
        """See `Checkpoint.describe_type`."""
        return self._checkpoint.describe_type(self._locate(name))

    def load_tokenizer(self) -> Tokenizer | None:
        """See `Checkpoint.load_tokenizer`."""
        return self._checkpoint.load_tokenizer()

    def read_chat_template(self) -> ChatTemplate | None:
        """See `Checkpoint.read_chat_template`."""
        return self._checkpoint.read_chat_template()

    def _rename(self, name: str) -> str | None:
        """What a tensor is called here; None if it is not."""
        match = LAYER_NAME.fullmatch(name)
        if match is None or int(match[1]) >= self._checkpoint.config.n_layers:
            return name
        number = self._numbers.get(int(match[1]))
        return None if number is None else f"layers.{number}.{match[2]}"

    def _locate(self, name: str) -> str:
        """What the checkpoint calls a tensor."""
        match = LAYER_NAME.fullmatch(name)
        return name if match is None else f"layers.{self._layers[int(match[1])]}.{match[2]}"


def list_products(
    checkpoint: Checkpoint, *, device: torch.device, dtype: torch.dtype, weights: Weights = "stored"
) -> list[tuple[Format, tuple[int, int]]]:
    """Forms and shapes (out_features, in_features) of all matrices that the Triton kernels would multiply, each once.

    They are those that `load_model` makes of the checkpoint, given the same arguments; raises as it does.
    """
    model = load_model(Outline(checkpoint), device=device, dtype=dtype, weights=weights, kernels="triton")
    matrices = [
        matrix for module in model.modules() if isinstance(module, TritonLinear) for matrix in module.list_packed()
    ]
    if checkpoint.config.tie_word_embeddings and isinstance(model.tok_embeddings, TritonEmbedding):
        matrices.append(model.tok_embeddings.matrix.weight)
    return list(dict.fromkeys((find_format(matrix), (matrix.shape[0], matrix.width)) for matrix in matrices))
