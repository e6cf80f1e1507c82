"""A GGUF file: mapped, its blocks dequantized by the `gguf` package or handed out as they lie."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gptfast.chat import ChatTemplate, read_chat_template
from gptfast.checkpoint.base import (
    DENSE_DTYPES,
    EXPANDED_AT_ONCE,
    ROTARY_PROJECTIONS,
    Checkpoint,
    canonicalize_name,
    check_shape,
    deinterleave_rotary_rows,
)
from gptfast.checkpoint.fields import Fields
from gptfast.checkpoint.gguf_blocks import can_unpack, unpack_blocks
from gptfast.checkpoint.gguf_metadata import ROPE_FACTORS, TENSOR_INDEX, open_metadata_directory
from gptfast.checkpoint.hf_config import parse_config, parse_generation_defaults
from gptfast.checkpoint.shapes import list_tensor_shapes
from gptfast.errors import CheckpointError
from gptfast.files import read_json
from gptfast.quantization import QuantizedWeight, slice_rows
from gptfast.tokenizer import Tokenizer, open_tokenizer

CANONICAL_NAMES = {
    "token_embd": "tok_embeddings",
    "output_norm": "norm",
    "output": "output",
    "attn_q": "attention.wq",
    "attn_k": "attention.wk",
    "attn_v": "attention.wv",
    "attn_output": "attention.wo",
    "attn_q_norm": "attention.q_norm",
    "attn_k_norm": "attention.k_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "attn_norm": "attention_norm",
    "ffn_norm": "ffn_norm",
}
LAYER_NAME = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")


@dataclass(frozen=True)
class QuantizedBlocks:
    """A matrix as the file stores it.

    Attributes:
        data: (rows, bytes per row) uint8, rows in canonical order.
        type: the name of ggml's block format, such as Q4_1.
        shape: (rows, columns) of the matrix that the blocks encode.
    """

    data: Tensor
    type: str
    shape: tuple[int, int]


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies in the file: `shape` in elements, `offset` and `bytes` in bytes."""

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


class GgufCheckpoint(Checkpoint):
    """See `Checkpoint`. The file is mapped; F32, F16 and BF16 tensors are views of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._directory = open_metadata_directory(path)
        raw, generation, index = (
            read_json(self._directory / name) for name in ("config.json", "generation_config.json", TENSOR_INDEX)
        )
        self.config = parse_config(raw, str(path))
        self.generation = parse_generation_defaults(
            Fields(raw, str(path)), Fields(generation, str(path)), self.config.vocab_size
        )
        self._shapes = list_tensor_shapes(self.config)
        stored = [StoredTensor(name, **{**entry, "shape": tuple(entry["shape"])}) for name, entry in index.items()]
        self._tensors = {
            canonicalize_name(item.name, LAYER_NAME, CANONICAL_NAMES): item
            for item in stored
            if item.name != ROPE_FACTORS
        }
        self.stored_bytes = sum(item.bytes for item in self._tensors.values())
        self._file = self._map_file()
        # llama.cpp's converter interleaves the rotary pairs of this architecture, and of no other we read.
        self._is_interleaved = self.config.architecture == "llama"

    def names(self) -> frozenset[str]:
        """See `Checkpoint.names`."""
        return frozenset(self._tensors)

    def read(self, name: str) -> Tensor:
        """See `Checkpoint.read`."""
        stored = self._tensors[name]
        if stored.type in DENSE_DTYPES:
            tensor = self._get_bytes(stored).view(DENSE_DTYPES[stored.type]).view(stored.shape)
            return self._reorder_rows(name, tensor)
        tensor = torch.empty(stored.shape, dtype=torch.float32)
        self.read_into(name, tensor)
        return tensor

    def view(self, name: str) -> Tensor | None:
        """See `Checkpoint.view`."""
        return self.read(name) if self._tensors[name].type in DENSE_DTYPES else None

    def iterate_rows(self, name: str, shape: tuple[int, ...]) -> Iterator[tuple[slice, Tensor]]:
        """See `Checkpoint.iterate_rows`."""
        if self._tensors[name].type in DENSE_DTYPES:
            return super().iterate_rows(name, shape)
        self._check_shape(name, shape)
        return self._dequantize(self.read_blocks(name))

    def read_quantized(self, name: str) -> QuantizedWeight | None:
        """See `Checkpoint.read_quantized`."""
        stored = self._tensors[name]
        if not can_unpack(stored.type) or len(stored.shape) != 2:
            return None
        self._check_shape(name, self._shapes.get(name, stored.shape))
        return unpack_blocks(self.read_blocks(name).data, stored.type)

    def describe_type(self, name: str) -> str:
        """See `Checkpoint.describe_type`."""
        return self._tensors[name].type

    def read_blocks(self, name: str) -> QuantizedBlocks:
        """The matrix unexpanded; raises CheckpointError if it is stored dense."""
        stored = self._tensors[name]
        if stored.type in DENSE_DTYPES or len(stored.shape) != 2:
            raise CheckpointError(f"tensor {name} in {self.path} is stored as {stored.type}, not in quantized blocks")
        rows, columns = stored.shape
        data = self._reorder_rows(name, self._get_bytes(stored).view(rows, -1))
        return QuantizedBlocks(data=data, type=stored.type, shape=(rows, columns))

    def load_tokenizer(self) -> Tokenizer:
        """See `Checkpoint.load_tokenizer`."""
        return open_tokenizer(self._directory)

    def read_chat_template(self) -> ChatTemplate | None:
        """See `Checkpoint.read_chat_template`."""
        return read_chat_template(self._directory)

    def _map_file(self) -> torch.UntypedStorage:
        size = self.path.stat().st_size
        for stored in self._tensors.values():
            if stored.offset + stored.bytes > size:
                raise CheckpointError(
                    f"{self.path} ends before its tensor {stored.name}; it is only partly downloaded, "
                    "so download it again"
                )
        storage: torch.UntypedStorage = torch.UntypedStorage.from_file(  # type: ignore[assignment]
            str(self.path), shared=False, nbytes=size
        )
        return storage

    def _get_bytes(self, stored: StoredTensor) -> Tensor:
        # Every tensor has a storage of its own: torch.compile takes tensors that share one for aliases.
        storage = self._file[stored.offset : stored.offset + stored.bytes]
        return torch.empty(0, dtype=torch.uint8).set_(storage)

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        check_shape(self.path, name, self._tensors[name].shape, shape)

    def _reorder_rows(self, name: str, tensor: Tensor) -> Tensor:
        if self._is_interleaved and name.split(".")[-2] in ROTARY_PROJECTIONS:
            self._check_shape(name, self._shapes[name])
            return deinterleave_rotary_rows(tensor, self.config.head_dim)
        return tensor

    def _dequantize(self, blocks: QuantizedBlocks) -> Iterator[tuple[slice, Tensor]]:
        import gguf
        import numpy as np

        kind = gguf.GGMLQuantizationType[blocks.type]
        for part in slice_rows(blocks.shape, EXPANDED_AT_ONCE):
            try:
                with np.errstate(all="ignore"):  # what is damaged shows in the values, and `check_finite` names it
                    values = gguf.dequantize(blocks.data[part].numpy(), kind)
            except NotImplementedError as error:
                raise CheckpointError(
                    f"{self.path} stores weights as {blocks.type}, which the gguf package cannot dequantize; "
                    "use a file of another quantization"
                ) from error
            yield part, torch.from_numpy(values)
