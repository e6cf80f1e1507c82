"""A Hugging Face directory: `config.json` beside one or many safetensors files."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import safetensors
import torch
from torch import Tensor

from gptfast.chat import ChatTemplate, read_chat_template
from gptfast.checkpoint.base import EXPANDED_AT_ONCE, Checkpoint, canonicalize_name, check_shape
from gptfast.checkpoint.compressed_matrix import CompressedMatrix, StoredParts, open_matrix
from gptfast.checkpoint.compressed_tensors import QUANTIZED_PARTS, find_compressed, parse_compression
from gptfast.checkpoint.fields import Fields
from gptfast.checkpoint.hf_config import parse_config, parse_generation_defaults
from gptfast.checkpoint.shapes import list_tensor_shapes
from gptfast.errors import CheckpointError
from gptfast.files import read_head, read_json
from gptfast.quantization import QuantizedWeight, slice_rows
from gptfast.tokenizer import Tokenizer, open_tokenizer

logger = logging.getLogger(__name__)

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

CANONICAL_NAMES = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}
LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
DERIVED_TENSOR = re.compile(r".*\.rotary_emb\.inv_freq")
"""Old exports store the rotary frequencies, which follow from the config."""


class HuggingFaceCheckpoint(Checkpoint):
    """See `Checkpoint`. Dense tensors are views of the mapped files; what compressed-tensors wrote is expanded."""

    def __init__(self, path: Path) -> None:
        self.path = path
        config_path, generation_path = path / "config.json", path / "generation_config.json"
        raw = read_json(config_path)
        generation = read_json(generation_path) if generation_path.exists() else {}
        self.config = parse_config(raw, str(config_path))
        self.generation = parse_generation_defaults(
            Fields(raw, str(config_path)), Fields(generation, str(generation_path)), self.config.vocab_size
        )
        compression = parse_compression(raw, str(config_path))
        self._files = {file: _open_file(file) for file in _list_files(path)}
        locations = _locate_tensors(path, self._files)
        self._owners = {stored_name: file for file, stored_name in locations.values()}
        self._modules = {} if compression is None else find_compressed(self._owners, compression, path)
        self._compressed = {
            canonicalize_name(f"{module}.weight", LAYER_NAME, CANONICAL_NAMES): module for module in self._modules
        }
        parts = {f"{module}.{part}" for module in self._modules for part in QUANTIZED_PARTS}
        self._dense = {name: stored_name for name, (_, stored_name) in locations.items() if stored_name not in parts}
        self._shapes = list_tensor_shapes(self.config)
        self.stored_bytes = sum(file.stat().st_size for file in self._files)
        if any(scheme.rounds_inputs for scheme in self._modules.values()):
            logger.warning("%s is made for activations rounded to fp8; gptfast does not round activations to fp8", path)

    def names(self) -> frozenset[str]:
        """See `Checkpoint.names`."""
        return frozenset(self._dense.keys() | self._compressed.keys())

    def read(self, name: str) -> Tensor:
        """See `Checkpoint.read`."""
        if name not in self._compressed:
            return self._get_tensor(self._dense[name])
        out = torch.empty(self._open_matrix(name).shape)
        self.read_into(name, out)
        return out

    def view(self, name: str) -> Tensor | None:
        """See `Checkpoint.view`."""
        return None if name in self._compressed else self.read(name)

    def iterate_rows(self, name: str, shape: tuple[int, ...]) -> Iterator[tuple[slice, Tensor]]:
        """See `Checkpoint.iterate_rows`."""
        if name not in self._compressed:
            return super().iterate_rows(name, shape)
        matrix = self._open_matrix(name)
        check_shape(self.path, name, matrix.shape, shape)
        return ((rows, matrix.read_rows(rows).dequantize()) for rows in slice_rows(shape, EXPANDED_AT_ONCE))

    def read_quantized(self, name: str) -> QuantizedWeight | None:
        """See `Checkpoint.read_quantized`."""
        if name not in self._compressed:
            return None
        matrix = self._open_matrix(name)
        check_shape(self.path, name, matrix.shape, self._shapes.get(name, matrix.shape))
        return matrix.read_rows(slice(None))

    def describe_type(self, name: str) -> str:
        """See `Checkpoint.describe_type`."""
        if name in self._compressed:
            return self._modules[self._compressed[name]].rounding.describe()
        stored_name = self._dense[name]
        opened = self._files[self._owners[stored_name]]
        return str(opened.get_slice(stored_name).get_dtype())  # type: ignore[no-untyped-call]

    def load_tokenizer(self) -> Tokenizer:
        """See `Checkpoint.load_tokenizer`."""
        return open_tokenizer(self.path)

    def read_chat_template(self) -> ChatTemplate | None:
        """See `Checkpoint.read_chat_template`."""
        return read_chat_template(self.path)

    def _get_tensor(self, stored_name: str) -> Tensor:
        opened = self._files[self._owners[stored_name]]
        tensor: Tensor = opened.get_tensor(stored_name)  # type: ignore[no-untyped-call]
        return tensor

    def _find_tensor(self, stored_name: str) -> Tensor | None:
        return self._get_tensor(stored_name) if stored_name in self._owners else None

    def _open_matrix(self, name: str) -> CompressedMatrix:
        module = self._compressed[name]
        return open_matrix(StoredParts(self.path, module, self._find_tensor), self._modules[module])


def _list_files(path: Path) -> list[Path]:
    if (path / INDEX_NAME).exists():
        return [path / name for name in sorted(set(_read_weight_map(path).values()))]
    files = [path / SINGLE_NAME] if (path / SINGLE_NAME).exists() else sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{path} holds no safetensors file; pickled .bin weights are not read, "
            "so save the model again with safe serialization"
        )
    return files


def _read_weight_map(path: Path) -> dict[str, str]:
    weight_map = read_json(path / INDEX_NAME).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{path / INDEX_NAME} maps no tensors to files in weight_map; download it again")
    return weight_map


def _open_file(file: Path) -> safetensors.safe_open:
    if not file.is_file():
        raise CheckpointError(f"{file} is listed in {INDEX_NAME} but is not a file on disk; download that shard")
    read_head(file)
    try:
        return safetensors.safe_open(file, framework="pt")
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{file} is damaged or only partly downloaded ({error}); download it again") from error


def _locate_tensors(path: Path, files: dict[Path, safetensors.safe_open]) -> dict[str, tuple[Path, str]]:
    """Where each tensor lies, by canonical name, checked against the index where there is one."""
    locations: dict[str, tuple[Path, str]] = {}
    for file, opened in files.items():
        for stored_name in opened.keys():  # type: ignore[no-untyped-call]  # noqa: SIM118
            if DERIVED_TENSOR.fullmatch(stored_name):
                continue
            name = canonicalize_name(stored_name, LAYER_NAME, CANONICAL_NAMES)
            if name in locations:
                raise CheckpointError(
                    f"tensor {stored_name} stands in both {locations[name][0]} and {file}; remove one"
                )
            locations[name] = file, stored_name
    if (path / INDEX_NAME).exists():
        for stored_name, file_name in _read_weight_map(path).items():
            found = locations.get(canonicalize_name(stored_name, LAYER_NAME, CANONICAL_NAMES))
            if not DERIVED_TENSOR.fullmatch(stored_name) and (found is None or found[0] != path / file_name):
                raise CheckpointError(
                    f"tensor {stored_name} is listed in {path / INDEX_NAME} but is not in {file_name}; "
                    "download that shard again"
                )
    return locations
