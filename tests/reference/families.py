"""Tiny models that stand for every kind of checkpoint: one `ModelConfig` each, and random weights for it."""

from __future__ import annotations

import zlib
from typing import Protocol

import torch
from torch import Tensor

from gptfast.config import ModelConfig, RopeScaling

FAMILIES: dict[str, ModelConfig] = {
    # 32/4 and 8/2: with H/K == K a permutation by the wrong head count would go unseen.
    "llama-32-4": ModelConfig(
        architecture="llama",
        dim=128,
        n_layers=2,
        n_heads=32,
        n_kv_heads=4,
        head_dim=4,
        ffn_dim=352,
        vocab_size=320,
        max_seq_len=2048,
        norm_eps=1e-5,
        rope_theta=10_000.0,
    ),
    "llama-8-2": ModelConfig(
        architecture="llama",
        dim=64,
        n_layers=3,
        n_heads=8,
        n_kv_heads=2,
        head_dim=8,
        ffn_dim=192,
        vocab_size=320,
        max_seq_len=4096,
        norm_eps=1e-6,
        rope_theta=500_000.0,
    ),
    "llama-tied": ModelConfig(
        architecture="llama",
        dim=64,
        n_layers=2,
        n_heads=8,
        n_kv_heads=2,
        head_dim=8,
        ffn_dim=192,
        vocab_size=288,
        max_seq_len=2048,
        norm_eps=1e-5,
        rope_theta=10_000.0,
        tie_word_embeddings=True,
    ),
    "llama-bias": ModelConfig(
        architecture="llama",
        dim=64,
        n_layers=2,
        n_heads=8,
        n_kv_heads=2,
        head_dim=8,
        ffn_dim=192,
        vocab_size=288,
        max_seq_len=2048,
        norm_eps=1e-6,
        rope_theta=10_000.0,
        qkv_bias=True,
        output_bias=True,
    ),
    # An original context of 512 puts the eight frequencies into all three bands of Llama 3.1's rule.
    "llama3-rope": ModelConfig(
        architecture="llama",
        dim=64,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        head_dim=16,
        ffn_dim=192,
        vocab_size=320,
        max_seq_len=4096,
        norm_eps=1e-5,
        rope_theta=500_000.0,
        rope_scaling=RopeScaling(
            kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=512
        ),
    ),
    "llama-linear-rope": ModelConfig(
        architecture="llama",
        dim=64,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        head_dim=16,
        ffn_dim=192,
        vocab_size=320,
        max_seq_len=8192,
        norm_eps=1e-6,
        rope_theta=10_000.0,
        rope_scaling=RopeScaling(kind="linear", factor=4.0),
    ),
    "mistral": ModelConfig(
        architecture="mistral",
        dim=64,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        head_dim=32,
        ffn_dim=160,
        vocab_size=288,
        max_seq_len=4096,
        norm_eps=1e-5,
        rope_theta=10_000.0,
        sliding_window=48,
    ),
    "qwen2": ModelConfig(
        architecture="qwen2",
        dim=64,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        head_dim=16,
        ffn_dim=160,
        vocab_size=288,
        max_seq_len=4096,
        norm_eps=1e-6,
        rope_theta=1_000_000.0,
        tie_word_embeddings=True,
        qkv_bias=True,
    ),
    "qwen3": ModelConfig(
        architecture="qwen3",
        dim=64,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        head_dim=32,
        ffn_dim=160,
        vocab_size=320,
        max_seq_len=4096,
        norm_eps=1e-6,
        rope_theta=1_000_000.0,
        qk_norm=True,
    ),
}

# A super-block of the K-quants holds 256 weights of a row, more than the families above have.
WIDE = ModelConfig(
    architecture="llama",
    dim=256,
    n_layers=1,
    n_heads=8,
    n_kv_heads=2,
    head_dim=32,
    ffn_dim=256,
    vocab_size=288,
    max_seq_len=512,
    norm_eps=1e-5,
    rope_theta=10_000.0,
)


class Vocabulary(Protocol):
    """What `random_tokens` needs of a config, ours or that of transformers."""

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The canonical name and shape of every tensor that a model of `config` consists of."""
    q_dim, kv_dim = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (config.vocab_size, config.dim)}
    for layer in range(config.n_layers):
        block: dict[str, tuple[int, ...]] = {
            "attention_norm.weight": (config.dim,),
            "attention.wq.weight": (q_dim, config.dim),
            "attention.wk.weight": (kv_dim, config.dim),
            "attention.wv.weight": (kv_dim, config.dim),
            "attention.wo.weight": (config.dim, q_dim),
            "ffn_norm.weight": (config.dim,),
            "feed_forward.w1.weight": (config.ffn_dim, config.dim),
            "feed_forward.w2.weight": (config.dim, config.ffn_dim),
            "feed_forward.w3.weight": (config.ffn_dim, config.dim),
        }
        if config.qkv_bias:
            block |= {
                "attention.wq.bias": (q_dim,),
                "attention.wk.bias": (kv_dim,),
                "attention.wv.bias": (kv_dim,),
            }
        if config.output_bias:
            block |= {"attention.wo.bias": (config.dim,)}
        if config.qk_norm:
            head = (config.head_dim,)
            block |= {"attention.q_norm.weight": head, "attention.k_norm.weight": head}
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in block.items()}
    shapes["norm.weight"] = (config.dim,)
    if not config.tie_word_embeddings:
        shapes["output.weight"] = (config.vocab_size, config.dim)
    return shapes


def random_weights(config: ModelConfig, *, seed: int = 0) -> dict[str, Tensor]:
    """Float32 weights in half-split rotary order, the same for the same config and seed.

    The scales make every part matter: logits spread by 1 to 5, attention is neither uniform nor one-hot,
    embeddings are small enough for the norm's eps to show, gains aren't one and biases aren't zero.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(repr(config).encode()) + seed)

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith("norm.weight"):
            return 0.5 + torch.rand(shape, generator=generator)
        normal = torch.randn(shape, generator=generator)
        if name.endswith(".bias"):
            return normal / 2
        if name == "tok_embeddings.weight":
            return normal * (0.15 if config.tie_word_embeddings else 0.05)
        gain = {"output": 2.0, "wq": 1.0, "wk": 1.0}.get(name.split(".")[-2], 1.3)
        return normal * gain / shape[-1] ** 0.5

    return {name: draw(name, shape) for name, shape in tensor_shapes(config).items()}


def random_tokens(config: Vocabulary, length: int, *, seed: int = 0) -> list[int]:
    """`length` token ids below the vocabulary's size."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (length,), generator=generator).tolist()
