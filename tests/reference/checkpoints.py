"""Writes one set of weights in every published layout: Hugging Face and Meta directories.

`weights` is always canonical: Meta's names, unfused, half-split rotary rows (see `tests.reference.model`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from gptfast.config import ModelConfig, RopeScaling

HF_NAMES = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}

INDEX_NAME = "model.safetensors.index.json"


def split_name(name: str) -> tuple[int | None, str, str]:
    """`layers.3.attention.wq.bias` -> (3, "attention.wq", "bias"); the layer is None outside the blocks."""
    module, _, kind = name.rpartition(".")
    if not module.startswith("layers."):
        return None, module, kind
    _, layer, module = module.split(".", 2)
    return int(layer), module, kind


def hf_name(name: str) -> str:
    """The name that transformers gives to the tensor with this canonical name."""
    layer, module, kind = split_name(name)
    prefix = "" if layer is None else f"model.layers.{layer}."
    return f"{prefix}{HF_NAMES[module]}.{kind}"


def swap_rotary_order(rows: Tensor, n_heads: int) -> Tensor:
    """Half-split rotary rows (first halves, then second halves) to interleaved ones, head by head."""
    grouped = rows.reshape(n_heads, 2, rows.shape[0] // n_heads // 2, *rows.shape[1:])
    return grouped.transpose(1, 2).reshape(rows.shape).contiguous()


def interleave_rotary(weights: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The same weights with wq and wk, weight and bias, in the interleaved order of Meta and GGUF files."""
    n_heads = {"attention.wq": config.n_heads, "attention.wk": config.n_kv_heads}
    return {
        name: swap_rotary_order(tensor, n_heads[module]) if (module := split_name(name)[1]) in n_heads else tensor
        for name, tensor in weights.items()
    }


# Hugging Face


def write_hf(
    directory: Path,
    weights: Mapping[str, Tensor],
    config: ModelConfig,
    *,
    shards: int = 1,
    index: bool | None = None,
    dtype: torch.dtype = torch.float32,
    spelling: Literal["rope_type", "type"] = "rope_type",
    rope_location: Literal["rope_scaling", "rope_parameters"] = "rope_scaling",
    overrides: Mapping[str, Any] | None = None,
    generation: Mapping[str, Any] | None = None,
) -> Path:
    """Write config.json and safetensors as transformers 4 (`rope_scaling`) or 5 (`rope_parameters`) does.

    `overrides` replaces keys of config.json (None deletes one is not meant: it writes null) and `generation`
    is the content of generation_config.json. The index is written if there are several shards.
    """
    directory.mkdir(parents=True, exist_ok=True)
    settings = hf_config(config, dtype=dtype, spelling=spelling, rope_location=rope_location)
    write_json(directory / "config.json", settings | dict(overrides or {}))
    if generation is not None:
        write_json(directory / "generation_config.json", generation)
    tensors = {hf_name(name): tensor.to(dtype).contiguous() for name, tensor in weights.items()}
    save_hf_tensors(directory, tensors, shards=shards, index=shards > 1 if index is None else index)
    return directory


def save_hf_tensors(directory: Path, tensors: Mapping[str, Tensor], *, shards: int, index: bool) -> None:
    """Deal the tensors out to `shards` safetensors files, with or without the index that names them."""
    names = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    names = ["model.safetensors"] if shards == 1 else names
    weight_map = {tensor: names[i % shards] for i, tensor in enumerate(tensors)}
    for file in names:
        own = {tensor: tensors[tensor] for tensor, owner in weight_map.items() if owner == file}
        save_file(own, directory / file, metadata={"format": "pt"})
    if index:
        total = sum(tensor.nbytes for tensor in tensors.values())
        write_json(directory / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})


def hf_config(
    config: ModelConfig,
    *,
    dtype: torch.dtype = torch.float32,
    spelling: Literal["rope_type", "type"] = "rope_type",
    rope_location: Literal["rope_scaling", "rope_parameters"] = "rope_scaling",
) -> dict[str, Any]:
    """The config.json of this model: the keys that its family carries, where either release has them."""
    settings = {
        "model_type": config.architecture,
        "architectures": [_hf_class(config.architecture)],
        "hidden_act": "silu",
        "hidden_size": config.dim,
        "intermediate_size": config.ffn_dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.02,
        "use_cache": True,
    }
    settings |= _hf_family_keys(config)
    scaling = _hf_rope_scaling(config, spelling)
    modern = rope_location == "rope_parameters"
    settings["dtype" if modern else "torch_dtype"] = str(dtype).removeprefix("torch.")
    if modern:
        settings["rope_parameters"] = (scaling or {spelling: "default"}) | {"rope_theta": config.rope_theta}
    else:
        settings |= {"rope_theta": config.rope_theta, "rope_scaling": scaling}
    return settings


def _hf_class(architecture: str) -> str:
    return f"{architecture.capitalize()}ForCausalLM"


def _hf_family_keys(config: ModelConfig) -> dict[str, Any]:
    derived_head_dim = config.head_dim * config.n_heads == config.dim
    head_dim = {} if derived_head_dim else {"head_dim": config.head_dim}
    if config.architecture == "llama":
        return head_dim | {"attention_bias": config.qkv_bias, "mlp_bias": False, "pretraining_tp": 1}
    if config.architecture == "mistral":
        return head_dim | {"sliding_window": config.sliding_window}
    # Published Qwen files carry a window together with the switch that disables it.
    unused_window = {"use_sliding_window": False, "sliding_window": 16, "max_window_layers": 1}
    if config.architecture == "qwen3":
        return head_dim | unused_window | {"attention_bias": config.qkv_bias}
    return head_dim | unused_window


def _hf_rope_scaling(config: ModelConfig, spelling: str) -> dict[str, Any] | None:
    scaling = config.rope_scaling
    if scaling is None:
        return None
    settings: dict[str, Any] = {spelling: scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        settings |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_seq_len,
        }
    return settings


# Meta

# What the scaled rope of Meta's reference code means; params.json only says whether it is on.
META_SCALED_ROPE = RopeScaling(
    kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192
)
META_MULTIPLE_OF = 32

# Llama 2 splits the embedding by columns (ParallelEmbedding), Llama 3 by rows (VocabParallelEmbedding).
META_SPLIT_AXIS = {
    "attention.wq": 0,
    "attention.wk": 0,
    "attention.wv": 0,
    "attention.wo": 1,
    "feed_forward.w1": 0,
    "feed_forward.w2": 1,
    "feed_forward.w3": 0,
    "output": 0,
}


def write_meta(
    directory: Path,
    weights: Mapping[str, Tensor],
    config: ModelConfig,
    *,
    shards: int = 1,
    release: Literal["llama2", "llama3"] = "llama3",
    dtype: torch.dtype = torch.float32,
    overrides: Mapping[str, Any] | None = None,
    extra: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write params.json and consolidated.NN.pth as the model-parallel checkpoints of Meta's releases.

    Rotary rows are interleaved; `extra` tensors go into every shard as they are.
    """
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "params.json", meta_params(config, release=release) | dict(overrides or {}))
    stored = {name: tensor.to(dtype) for name, tensor in interleave_rotary(weights, config).items()}
    for shard in range(shards):
        own = {name: _meta_shard(name, tensor, shard, shards, release) for name, tensor in stored.items()}
        torch.save(own | dict(extra or {}), directory / f"consolidated.{shard:02}.pth")
    return directory


def meta_params(config: ModelConfig, *, release: Literal["llama2", "llama3"]) -> dict[str, Any]:
    """params.json as the release has it; the size of the feed-forward layer follows from Meta's rule."""
    # ffn_dim = round_up(int(multiplier * int(2/3 * 4 * dim)), multiple_of), meta-llama/llama model.py
    params: dict[str, Any] = {
        "dim": config.dim,
        "n_layers": config.n_layers,
        "n_heads": config.n_heads,
        "n_kv_heads": config.n_kv_heads,
        "multiple_of": META_MULTIPLE_OF,
        "norm_eps": config.norm_eps,
        "vocab_size": config.vocab_size,
    }
    if release == "llama2":
        return params | {"vocab_size": -1}
    return params | {
        "ffn_dim_multiplier": config.ffn_dim / int(8 * config.dim / 3),
        "rope_theta": config.rope_theta,
        "use_scaled_rope": config.rope_scaling is not None,
    }


def _meta_shard(name: str, tensor: Tensor, shard: int, shards: int, release: str) -> Tensor:
    module = split_name(name)[1]
    axes = META_SPLIT_AXIS | {"tok_embeddings": 1 if release == "llama2" else 0}
    if module not in axes:
        return tensor.clone()
    # Cloned: a view would drag the whole tensor into every file.
    return tensor.chunk(shards, dim=axes[module])[shard].clone()


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content` as indented JSON."""
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")


def edit_json(path: Path, *, remove: Iterable[str] = (), **changes: Any) -> None:
    """Set and remove top-level keys of a JSON file."""
    content = json.loads(path.read_text(encoding="utf-8")) | changes
    write_json(path, {key: value for key, value in content.items() if key not in set(remove)})
