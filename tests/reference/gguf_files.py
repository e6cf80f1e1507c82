"""Writes weights as a GGUF file the way llama.cpp's converter does, in any type that has a block layout."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from gptfast.config import ModelConfig
from tests.reference.checkpoints import interleave_rotary, split_name
from tests.reference.model import rope_factors

GGUF_NAMES = {
    "tok_embeddings": "token_embd",
    "norm": "output_norm",
    "output": "output",
    "attention_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "attention.wq": "attn_q",
    "attention.wk": "attn_k",
    "attention.wv": "attn_v",
    "attention.wo": "attn_output",
    "attention.q_norm": "attn_q_norm",
    "attention.k_norm": "attn_k_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
}

# Mistral has no architecture of its own in GGUF.
GGUF_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}

EXPANDED_TYPES = ("F32", "F16", "BF16")
QUANTIZED_TYPES = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
# gguf can expand these but not make them, so their blocks are random. The offsets of a block's fp16 scales:
SCALE_OFFSETS = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def read_gguf_weights(path: Path, config: ModelConfig) -> dict[str, Tensor]:
    """All tensors of a file, read and expanded by gguf alone: canonical names and order, float32."""
    names = {f"{stored}.{kind}": (name, kind) for name, stored in GGUF_NAMES.items() for kind in ("weight", "bias")}
    weights = {}
    for tensor in gguf.GGUFReader(path).tensors:
        prefix, stored_name = "", tensor.name
        if stored_name.startswith("blk."):
            _, layer, stored_name = stored_name.split(".", 2)
            prefix = f"layers.{layer}."
        module, kind = names[stored_name]
        weights[f"{prefix}{module}.{kind}"] = decode(tensor.data, tensor.tensor_type)
    return _restore_rotary(weights, config) if GGUF_ARCHITECTURES[config.architecture] == "llama" else weights


def gguf_name(name: str) -> str:
    """The name that llama.cpp gives to the tensor with this canonical name."""
    layer, module, kind = split_name(name)
    prefix = "" if layer is None else f"blk.{layer}."
    return f"{prefix}{GGUF_NAMES[module]}.{kind}"


def write_gguf(
    path: Path,
    weights: Mapping[str, Tensor],
    config: ModelConfig,
    *,
    types: str | Mapping[str, str] = "F32",
    metadata: Mapping[str, int | float | str | bool] | None = None,
    extra: Mapping[str, Tensor] | None = None,
    without: Collection[str] = (),
    architecture: str | None = None,
) -> dict[str, Tensor]:
    """Write the file and return what it holds, expanded by gguf itself: canonical names and order, float32.

    `types` is the type of every matrix, or of each by canonical name (F32 where it names none). Vectors are
    F32. `metadata` replaces or adds values and `without` leaves some out, `extra` adds tensors under the names
    that it gives, and `architecture` lies about what the model is.
    """
    architecture = architecture or GGUF_ARCHITECTURES[config.architecture]
    writer = gguf.GGUFWriter(path, architecture)
    _write_metadata(writer, architecture, config, metadata or {}, without)
    permuted = architecture == "llama"
    stored = interleave_rotary(weights, config) if permuted else dict(weights)
    expanded: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        matrix_type = types if isinstance(types, str) else types.get(name, "F32")
        qtype = Type[matrix_type] if tensor.dim() == 2 else Type.F32
        data = encode(tensor, qtype, seed=len(expanded))
        writer.add_tensor(gguf_name(name), data, raw_dtype=qtype)
        expanded[name] = decode(data, qtype)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return _restore_rotary(expanded, config) if permuted else expanded


def encode(tensor: Tensor, qtype: Type, *, seed: int = 0) -> np.ndarray:
    """The bytes of a (rows, columns) tensor as GGUF stores them; random ones where gguf can't quantize."""
    if qtype.name in SCALE_OFFSETS:
        return random_blocks(qtype, tensor.shape[0], tensor.shape[1], seed=seed)
    array: np.ndarray = gguf.quants.quantize(np.ascontiguousarray(tensor.numpy()), qtype)
    return array


def decode(data: np.ndarray, qtype: Type) -> Tensor:
    """What gguf's own dequantizer makes of the bytes: float32."""
    return torch.from_numpy(np.array(gguf.quants.dequantize(data, qtype), dtype=np.float32))


def random_blocks(qtype: Type, rows: int, columns: int, *, seed: int = 0) -> np.ndarray:
    """Valid blocks (rows, bytes) uint8: every bit random, but the scales small and finite."""
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[qtype]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (rows * columns // block_size, block_bytes), dtype=np.uint8)
    for offset in SCALE_OFFSETS[qtype.name]:
        scales = generator.uniform(0.5e-4, 2e-4, len(blocks)).astype(np.float16)
        blocks[:, offset : offset + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


def rope_factor_tensor(config: ModelConfig) -> Tensor:
    """`rope_freqs.weight`: what llama.cpp's converter writes for Llama 3.1's scaling, (D/2,) float32."""
    assert config.rope_scaling is not None
    frequencies = [config.rope_theta ** (-2 * i / config.head_dim) for i in range(config.head_dim // 2)]
    return torch.tensor(rope_factors(frequencies, config.rope_scaling), dtype=torch.float32)


def gpt2_vocabulary(size: int) -> tuple[list[str], list[str], list[int]]:
    """Tokens, merges and token types of a byte-level BPE: 256 bytes, merged pairs, control tokens."""
    merges = [f"{left} {right}" for left in "etaoinsrhl" for right in "etaoinsrhl"]
    merges = merges[: size - 256 - len(CONTROL_TOKENS)]
    ordinary = [*_byte_characters(), *(merge.replace(" ", "") for merge in merges)]
    types = [gguf.TokenType.NORMAL] * len(ordinary) + [gguf.TokenType.CONTROL] * len(CONTROL_TOKENS)
    return [*ordinary, *CONTROL_TOKENS], merges, [int(kind) for kind in types]


def _write_metadata(
    writer: gguf.GGUFWriter,
    architecture: str,
    config: ModelConfig,
    metadata: Mapping[str, int | float | str | bool],
    without: Collection[str],
) -> None:
    values: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_seq_len,
        "embedding_length": config.dim,
        "block_count": config.n_layers,
        "feed_forward_length": config.ffn_dim,
        "attention.head_count": config.n_heads,
        "attention.head_count_kv": config.n_kv_heads,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.freq_base": config.rope_theta,
        "rope.dimension_count": config.head_dim,
    }
    if config.head_dim * config.n_heads == config.dim:
        # Older files of such models have no explicit head size.
        del values["attention.key_length"], values["attention.value_length"]
    if config.sliding_window is not None:
        values["attention.sliding_window"] = config.sliding_window
    if config.rope_scaling is not None and config.rope_scaling.kind == "linear":
        values |= {"rope.scaling.type": "linear", "rope.scaling.factor": config.rope_scaling.factor}
    tokens, merges, types = gpt2_vocabulary(config.vocab_size)
    values = {f"{architecture}.{key}": value for key, value in values.items()} | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.bos_token_id": tokens.index("<|im_start|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.ggml.add_bos_token": False,
    }
    for key, value in (values | dict(metadata)).items():
        if key not in without:
            _add_value(writer, key, value)
    writer.add_array("tokenizer.ggml.tokens", tokens)
    writer.add_array("tokenizer.ggml.token_type", types)
    writer.add_array("tokenizer.ggml.merges", merges)
    if config.rope_scaling is not None and config.rope_scaling.kind == "llama3":
        writer.add_tensor("rope_freqs.weight", rope_factor_tensor(config).numpy())


def _add_value(writer: gguf.GGUFWriter, key: str, value: int | float | str | bool) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)


def _restore_rotary(weights: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    n_heads = {"attention.wq": config.n_heads, "attention.wk": config.n_kv_heads}
    return {
        name: _to_half_split(tensor, n_heads[module]) if (module := split_name(name)[1]) in n_heads else tensor
        for name, tensor in weights.items()
    }


def _to_half_split(rows: Tensor, n_heads: int) -> Tensor:
    grouped = rows.reshape(n_heads, rows.shape[0] // n_heads // 2, 2, *rows.shape[1:])
    return grouped.transpose(1, 2).reshape(rows.shape).contiguous()


def _byte_characters() -> list[str]:
    """GPT-2's stand-ins of the bytes, in its order: the printable ones, then the others from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(0x100 + i) for i in range(len(others))]
