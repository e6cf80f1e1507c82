"""A Llama-family decoder straight from its equations: float64, one head at a time, no cache, nothing fused.

`S` tokens, `E` dim, `H` query heads, `K` key/value heads, `D` head_dim, `V` vocabulary. Slow and plain on
purpose: it shares no code, layout or trick with the model that it judges.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from gptfast.config import ModelConfig, RopeScaling

Weights = Mapping[str, Tensor]


def reference_logits(weights: Weights, config: ModelConfig, token_ids: list[int]) -> Tensor:
    """Logits after every token: (S, V) float64.

    `weights` has Meta's names, unfused, with wq/wk rows in half-split rotary order; any float dtype.
    The block is the pre-norm residual block of Touvron et al. 2023 (LLaMA), section 2.2.
    """
    weights = {name: tensor.to(torch.float64) for name, tensor in weights.items()}
    x = weights["tok_embeddings.weight"][torch.tensor(token_ids)]
    for layer in range(config.n_layers):
        own = _select(weights, f"layers.{layer}.")
        x = x + attention(own, config, rms_norm(x, own["attention_norm.weight"], config.norm_eps))
        x = x + feed_forward(own, rms_norm(x, own["ffn_norm.weight"], config.norm_eps))
    x = rms_norm(x, weights["norm.weight"], config.norm_eps)
    head = weights["tok_embeddings.weight" if config.tie_word_embeddings else "output.weight"]
    return x @ head.T


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Normalize x / sqrt(mean(x^2) + eps) * gain over the last dimension (Zhang and Sennrich 2019, eq. 4)."""
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps) * gain


def attention(weights: Weights, config: ModelConfig, x: Tensor) -> Tensor:
    """Causal grouped-query attention (Vaswani et al. 2017, eq. 1; Ainslie et al. 2023): (S, E) -> (S, E)."""
    query_heads = _split_heads(_project(weights, "attention.wq", x), config)
    key_heads = _split_heads(_project(weights, "attention.wk", x), config)
    value_heads = _split_heads(_project(weights, "attention.wv", x), config)
    if config.qk_norm:
        query_heads = [rms_norm(q, weights["attention.q_norm.weight"], config.norm_eps) for q in query_heads]
        key_heads = [rms_norm(k, weights["attention.k_norm.weight"], config.norm_eps) for k in key_heads]

    frequencies = rope_frequencies(config)
    visible = visible_positions(x.shape[0], config.sliding_window)
    key_heads = [rotate(key, frequencies) for key in key_heads]
    outputs = []
    for head, query in enumerate(query_heads):
        kv_head = head // (config.n_heads // config.n_kv_heads)
        scores = rotate(query, frequencies) @ key_heads[kv_head].T / math.sqrt(config.head_dim)
        scores = scores.masked_fill(~visible, -math.inf)
        outputs.append(torch.softmax(scores, dim=-1) @ value_heads[kv_head])
    return _project(weights, "attention.wo", torch.cat(outputs, dim=-1))


def feed_forward(weights: Weights, x: Tensor) -> Tensor:
    """W2 (SiLU(W1 x) * W3 x): the SwiGLU layer of Shazeer 2020, eq. 6, with beta = 1."""
    gate = _project(weights, "feed_forward.w1", x)
    gated = gate / (1 + torch.exp(-gate)) * _project(weights, "feed_forward.w3", x)
    return _project(weights, "feed_forward.w2", gated)


def visible_positions(length: int, sliding_window: int | None) -> Tensor:
    """(S, S) bool: whether query i sees key j, the `sliding_window` latest ones, itself included.

    Jiang et al. 2023 (Mistral 7B), section 2, counting as its reference implementation does.
    """
    distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
    visible = distance >= 0
    return visible if sliding_window is None else visible & (distance < sliding_window)


def rotate(x: Tensor, frequencies: Tensor) -> Tensor:
    """Turn pair (i, i + D/2) of the token at position p by p * frequencies[i]: (S, D) -> (S, D).

    Su et al. 2021 (RoFormer), eq. 34, with the pairs half a head apart as in Hugging Face checkpoints.
    """
    angles = torch.arange(x.shape[0], dtype=torch.float64)[:, None] * frequencies
    first, second = x.chunk(2, dim=-1)
    return torch.cat(
        [
            first * torch.cos(angles) - second * torch.sin(angles),
            second * torch.cos(angles) + first * torch.sin(angles),
        ],
        dim=-1,
    )


def rope_frequencies(config: ModelConfig) -> Tensor:
    """Radians per position of each rotary pair: (D/2,) float64; theta^(-2i/D) (RoFormer, section 3.2.2)."""
    frequencies = [config.rope_theta ** (-2 * i / config.head_dim) for i in range(config.head_dim // 2)]
    scaling = config.rope_scaling
    if scaling is not None:
        factors = rope_factors(frequencies, scaling)
        frequencies = [frequency / factor for frequency, factor in zip(frequencies, factors, strict=True)]
    return torch.tensor(frequencies, dtype=torch.float64)


def rope_factors(frequencies: list[float], scaling: RopeScaling) -> list[float]:
    """What each frequency is divided by: one number per frequency."""
    if scaling.kind == "linear":
        return [scaling.factor] * len(frequencies)
    if scaling.kind == "factors":
        return list(scaling.factors)
    return [_llama3_factor(frequency, scaling) for frequency in frequencies]


def _llama3_factor(frequency: float, scaling: RopeScaling) -> float:
    """Llama 3.1's rule (`apply_scaling` in meta-llama/llama-models), by turns within the trained context."""
    turns = scaling.original_max_seq_len * frequency / (2 * math.pi)
    if turns > scaling.high_freq_factor:
        return 1.0
    if turns < scaling.low_freq_factor:
        return scaling.factor
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return 1 / ((1 - kept) / scaling.factor + kept)


def _project(weights: Weights, name: str, x: Tensor) -> Tensor:
    y = x @ weights[f"{name}.weight"].T
    bias = weights.get(f"{name}.bias")
    return y if bias is None else y + bias


def _split_heads(x: Tensor, config: ModelConfig) -> list[Tensor]:
    return list(x.split(config.head_dim, dim=-1))


def _select(weights: Weights, prefix: str) -> Weights:
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
