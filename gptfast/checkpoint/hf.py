"""A Hugging Face directory: `config.json` beside one or many safetensors files."""

from __future__ import annotations

import re
from pathlib import Path

import safetensors
from torch import Tensor

from gptfast.chat import ChatTemplate, read_chat_template
from gptfast.checkpoint.base import Checkpoint, canonicalize_name
from gptfast.checkpoint.fields import Fields
from gptfast.checkpoint.hf_config import parse_config, parse_generation_defaults
from gptfast.errors import CheckpointError
from gptfast.files import read_head, read_json
from gptfast.tokenizer import Tokenizer, open_tokenizer

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
    """See `Checkpoint`. Tensors are views of the mapped files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        config_path, generation_path = path / "config.json", path / "generation_config.json"
        raw = read_json(config_path)
        generation = read_json(generation_path) if generation_path.exists() else {}
        self.config = parse_config(raw, str(config_path))
        self.generation = parse_generation_defaults(
            Fields(raw, str(config_path)), Fields(generation, str(generation_path)), self.config.vocab_size
        )
        self._files = {file: _open_file(file) for file in _list_files(path)}
        self._locations = _locate_tensors(path, self._files)
        self.stored_bytes = sum(file.stat().st_size for file in self._files)

    def names(self) -> frozenset[str]:
        """See `Checkpoint.names`."""
        return frozenset(self._locations)

    def read(self, name: str) -> Tensor:
        """See `Checkpoint.read`."""
        file, stored_name = self._locations[name]
        tensor: Tensor = self._files[file].get_tensor(stored_name)  # type: ignore[no-untyped-call]
        return tensor

    def view(self, name: str) -> Tensor:
        """See `Checkpoint.view`."""
        return self.read(name)

    def load_tokenizer(self) -> Tokenizer:
        """See `Checkpoint.load_tokenizer`."""
        return open_tokenizer(self.path)

    def read_chat_template(self) -> ChatTemplate | None:
        """See `Checkpoint.read_chat_template`."""
        return read_chat_template(self.path)


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
