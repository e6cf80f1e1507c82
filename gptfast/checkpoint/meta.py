"""Meta's own layout: `params.json`, `consolidated.NN.pth` and `tokenizer.model` in tiktoken form."""

from __future__ import annotations

import functools
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptfast.chat import LLAMA3_CHAT_TEMPLATE, ChatTemplate
from gptfast.checkpoint.base import (
    DTYPE_NAMES,
    ROTARY_PROJECTIONS,
    Checkpoint,
    check_tensor,
    deinterleave_rotary_rows,
)
from gptfast.checkpoint.fields import Fields
from gptfast.checkpoint.presets import compute_ffn_dim
from gptfast.checkpoint.shapes import list_tensor_shapes
from gptfast.config import GenerationDefaults, ModelConfig, RopeScaling
from gptfast.errors import CheckpointError
from gptfast.files import read_head, read_json
from gptfast.tokenizer import Tokenizer, open_tokenizer

SPLIT_ROWS = ("wq", "wk", "wv", "w1", "w3", "output")
SPLIT_COLUMNS = ("wo", "w2")
DERIVED_TENSOR = "rope.freqs"


class MetaCheckpoint(Checkpoint):
    """See `Checkpoint`. Shards, made for as many GPUs, are mapped and joined tensor by tensor."""

    def __init__(self, path: Path) -> None:
        self.path = path
        files = sorted(path.glob("consolidated.*.pth"))
        if not files:
            raise CheckpointError(f"{path} has params.json but no consolidated.*.pth; download the weights")
        self._check_shard_numbers(files)
        self._shards = [_load_shard(file) for file in files]
        self.config = parse_params(read_json(path / "params.json"), self._count_vocabulary(), str(path / "params.json"))
        self.stored_bytes = sum(file.stat().st_size for file in files)
        self._shapes = list_tensor_shapes(self.config)

    @functools.cached_property
    def generation(self) -> GenerationDefaults:  # type: ignore[override]
        """See `Checkpoint`. The ends of a text are in the vocabulary, which only who generates text needs."""
        tokenizer = self.load_tokenizer()
        ends = ("<|end_of_text|>", "<|eot_id|>", "<|eom_id|>")
        control = tokenizer.control_tokens
        return GenerationDefaults(
            eos_ids=tuple(control[end] for end in ends if end in control), bos_id=tokenizer.bos_id
        )

    def names(self) -> frozenset[str]:
        """See `Checkpoint.names`."""
        return frozenset(name for shard in self._shards for name in shard if name != DERIVED_TENSOR)

    def read(self, name: str) -> Tensor:
        """See `Checkpoint.read`."""
        for number, shard in enumerate(self._shards):
            if name not in shard:
                raise CheckpointError(
                    f"tensor {name} is not in consolidated.{number:02d}.pth in {self.path}; download that shard again"
                )
        parts = [shard[name] for shard in self._shards]
        if name in self._shapes and parts[0].dim() != len(self._shapes[name]):
            check_tensor(self.path, name, parts[0], self._shapes[name])
        if len({part.shape for part in parts}) > 1:
            raise CheckpointError(
                f"tensor {name} has another shape in some shard of {self.path} than in the rest; download them again"
            )
        axis = self._get_split_axis(name, parts[0])
        tensor = parts[0] if axis is None or len(parts) == 1 else torch.cat(parts, dim=axis)
        if name.split(".")[-2] in ROTARY_PROJECTIONS:
            check_tensor(self.path, name, tensor, self._shapes[name])
            tensor = deinterleave_rotary_rows(tensor, self.config.head_dim)
        return tensor

    def describe_type(self, name: str) -> str:
        """See `Checkpoint.describe_type`."""
        dtype = next(shard[name].dtype for shard in self._shards if name in shard)
        return DTYPE_NAMES.get(dtype, str(dtype))

    def load_tokenizer(self) -> Tokenizer:
        """See `Checkpoint.load_tokenizer`."""
        return self._tokenizer

    def read_chat_template(self) -> ChatTemplate | None:
        """Llama 3's format, which Meta publishes beside the checkpoint and not in it."""
        if "<|start_header_id|>" not in self.load_tokenizer().control_tokens:
            return None
        return ChatTemplate(LLAMA3_CHAT_TEMPLATE)

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        return open_tokenizer(self.path)

    def _get_split_axis(self, name: str, part: Tensor) -> int | None:
        module = name.split(".")[-2]
        if module == "tok_embeddings":
            # Llama 2 split the embedding by columns, Llama 3 splits it by vocabulary.
            return 1 if part.shape[0] == self.config.vocab_size else 0
        return 0 if module in SPLIT_ROWS else 1 if module in SPLIT_COLUMNS else None

    def _count_vocabulary(self) -> int:
        heads = [shard["output.weight"] for shard in self._shards if "output.weight" in shard]
        return sum(head.shape[0] for head in heads if head.dim() == 2)

    def _check_shard_numbers(self, files: list[Path]) -> None:
        for number, file in enumerate(files):
            if file.name != f"consolidated.{number:02d}.pth":
                raise CheckpointError(f"{self.path / f'consolidated.{number:02d}.pth'} is missing; download that shard")


def parse_params(raw: dict[str, Any], vocab_size: int, source: str) -> ModelConfig:
    """Turn Meta's `params.json` into a config; `vocab_size` (rows of the head) stands in for a stated -1.

    The file does not tell the context, so it is that of the generation it belongs to: 131,072 tokens with scaled
    rotary embeddings, 8,192 with the vocabulary of Llama 3, else 4,096.
    """
    if raw.get("moe") or "vision_chunk_size" in raw or raw.get("quantization_args"):
        raise CheckpointError(f"{source} describes a model that is not a dense text model; use another checkpoint")
    fields = Fields(raw, source)
    scaling = None
    if fields.get_flag("use_scaled_rope"):
        high = fields.get_positive("rope_high_freq_factor", 4.0)
        if high <= 1:
            raise fields.refuse("rope_high_freq_factor", "a number above 1, the low one,")
        scaling = RopeScaling(
            "llama3",
            factor=fields.get_positive("rope_scaling_factor", 8.0),
            low_freq_factor=1.0,
            high_freq_factor=high,
            original_max_seq_len=8192,
        )
    if raw.get("vocab_size", -1) != -1:
        vocab_size = fields.get_size("vocab_size")
    dim, n_heads = fields.get_size("dim"), fields.get_size("n_heads")
    multiplier = fields.get_number("ffn_dim_multiplier", 1.0) if raw.get("ffn_dim_multiplier") is not None else None
    context = 131_072 if scaling else 8_192 if vocab_size >= 128_000 else 4_096
    return ModelConfig(
        architecture="llama",
        dim=dim,
        n_layers=fields.get_size("n_layers"),
        n_heads=n_heads,
        n_kv_heads=fields.get_size("n_kv_heads", n_heads),
        head_dim=fields.get_size("head_dim", max(1, dim // n_heads)),
        ffn_dim=compute_ffn_dim(dim, fields.get_size("multiple_of"), multiplier),
        vocab_size=vocab_size,
        max_seq_len=fields.get_size("max_seq_len", context),
        norm_eps=fields.get_number("norm_eps"),
        rope_theta=fields.get_positive("rope_theta", 10_000.0),
        rope_scaling=scaling,
    )


def _load_shard(file: Path) -> dict[str, Tensor]:
    read_head(file)
    try:
        shard = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{file} is damaged or not a file of weights ({reason}); download it again") from error
    if not isinstance(shard, dict) or not all(isinstance(value, Tensor) for value in shard.values()):
        raise CheckpointError(f"{file} does not hold a table of tensors; it is not a checkpoint of Meta's")
    return shard
