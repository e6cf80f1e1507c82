"""The model: a Llama-family decoder with a static KV cache, in one file.

It covers Llama 1 to 3.2, SmolLM2, Mistral, Qwen2, Qwen2.5 and Qwen3; what differs between them is data in
`ModelConfig`. Parameter names are those of Meta's reference, with the projections that read the same input
fused: `wqkv` and `w13`.

Shapes: B batch, S tokens in this call, L cache length, N cache slots attended in this call,
H query heads, K key/value heads, G = H / K query heads that share one, D head_dim, E dim, V vocabulary.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptfast.config import ModelConfig, RopeScaling
from gptfast.linear import Linear, multiply

FUSED_PROJECTIONS = {"wqkv": ("wq", "wk", "wv"), "w13": ("w1", "w3")}
"""Which rows, in which order, a fused projection is made of."""


class Transformer(nn.Module):
    """Token ids in, next-token logits out. Call `setup_caches` before the first forward pass."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.queries_per_kv_head = config.n_heads // config.n_kv_heads
        self.sliding_window = config.sliding_window
        # A weight of its own, as the default one's initialization imports all of torch.compile, for 1.4 s.
        embedding = torch.empty(config.vocab_size, config.dim)
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim, _weight=embedding)
        self.layers = nn.ModuleList(TransformerBlock(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = None if config.tie_word_embeddings else Linear(config.dim, config.vocab_size, bias=False)
        self.rope_cos: Tensor
        self.rope_sin: Tensor

    def setup_caches(self, batch_size: int, max_seq_len: int) -> None:
        """Allocate zeroed KV caches and rotary tables for positions 0 to `max_seq_len` - 1.

        The caches have the weights' dtype; earlier ones are dropped, and with them what they held.
        """
        weight = self.tok_embeddings.weight
        for module in self.modules():
            if isinstance(module, Attention):
                module.setup_cache(batch_size, max_seq_len, dtype=weight.dtype, device=weight.device)
        cos, sin = compute_rope_tables(self.config, max_seq_len)
        self.register_buffer("rope_cos", cos.to(weight.device), persistent=False)
        self.register_buffer("rope_sin", sin.to(weight.device), persistent=False)

    def list_caches(self) -> list[KVCache]:
        """The layers' caches, first layer first; none before `setup_caches`."""
        return [module for module in self.modules() if isinstance(module, KVCache)]

    def count_weight_bytes_per_token(self) -> int:
        """Bytes of weights that one decode step reads; of an embedding that is not the head too, one row."""
        sizes = {name: parameter.nbytes for name, parameter in self.named_parameters()}
        if self.output is not None:
            sizes["tok_embeddings.weight"] //= self.config.vocab_size
        return sum(sizes.values())

    def forward(self, tokens: Tensor, input_pos: Tensor, kv_pos: Tensor, rows: Tensor | None = None) -> Tensor:
        """Compute logits and write the tokens' keys and values into the cache.

        Args:
            tokens: (B, S) int64. With B = 1 and a larger cache, every row of the cache is filled alike.
            input_pos: (S,) int64, the tokens' positions, which are also the cache slots they are written to.
            kv_pos: (N,) int64, the slots 0 to N-1 to attend over; a token never sees a slot after its own.
            rows: (R,) int64, which of the S tokens logits are wanted for; all of them if None.

        Returns:
            (B, R or S, V) float32 logits.
        """
        if torch.compiler.is_compiling():
            # One length for all, or a compiler that lets it vary would take it for another one in every block.
            for buffer in self.buffers():
                torch._check(buffer.shape[-2] == self.rope_cos.shape[-2])  # type: ignore[no-untyped-call]
        x = self.tok_embeddings(tokens)
        cos, sin = self.rope_cos[input_pos, None], self.rope_sin[input_pos, None]
        mask = build_attention_mask(input_pos, kv_pos, self.sliding_window, x.dtype)
        mask = mask.repeat(self.queries_per_kv_head, 1)
        for layer in self.layers:
            x = layer(x, cos, sin, mask, input_pos)
        if rows is not None:
            x = x[:, rows]
        x = self.norm(x)
        head = self.tok_embeddings if self.output is None else self.output
        return multiply(x, head.weight).float()


class TransformerBlock(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config)
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)

    # All blocks share one compiled region. It may write the cache by aten indexing only: an operator of our
    # own that mutates an argument is refused inside a region by torch 2.13 (pytorch#186807).
    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, input_pos: Tensor) -> Tensor:
        """(B, S, E) in, (B, S, E) out; see `Transformer.forward` and `build_attention_mask` for the rest."""
        x = x + self.attention(self.attention_norm(x), cos, sin, mask, input_pos)
        x = x + self.feed_forward(self.ffn_norm(x))
        return x


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023) over a static cache."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = config.n_heads, config.n_kv_heads, config.head_dim
        q_dim, kv_dim = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        self.split_sizes = [q_dim, kv_dim, kv_dim]
        self.wqkv = Linear(config.dim, q_dim + 2 * kv_dim, bias=config.qkv_bias)
        self.wo = Linear(q_dim, config.dim, bias=config.output_bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.kv_cache: KVCache

    def setup_cache(self, batch_size: int, max_seq_len: int, *, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate this layer's cache; see `Transformer.setup_caches`."""
        shape = (batch_size, self.n_kv_heads, max_seq_len, self.head_dim)
        self.kv_cache = KVCache(shape, dtype=dtype, device=device)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, input_pos: Tensor) -> Tensor:
        """(B, S, E) in, (B, S, E) out."""
        B, S, _ = x.shape
        H, K, D = self.n_heads, self.n_kv_heads, self.head_dim
        q, k, v = self.wqkv(x).split(self.split_sizes, dim=-1)
        q, k, v = q.view(B, S, H, D), k.view(B, S, K, D), v.view(B, S, K, D)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        self.kv_cache.write(input_pos, k.transpose(1, 2), v.transpose(1, 2))
        keys, values = self.kv_cache.read(B, mask.shape[-1])

        # The G query heads that share a key/value head become G * S rows of one product with it, so the
        # cache is read once, as it lies, and never repeated.
        q = q.view(B, S, K, H // K, D).permute(0, 2, 3, 1, 4).reshape(B, K, -1, D)
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        y = y.view(B, K, H // K, S, D).permute(0, 3, 1, 2, 4).reshape(B, S, H * D)
        projected: Tensor = self.wo(y)
        return projected


class KVCache(nn.Module):
    """Keys and values of all positions so far: two buffers (B, K, L, D) that never move.

    Slots are overwritten, not cleared: a slot after the current position holds zeros or what an earlier,
    longer text left there, always finite, and the mask hides it.
    """

    def __init__(self, shape: tuple[int, int, int, int], *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.k: Tensor
        self.v: Tensor
        self.register_buffer("k", torch.zeros(shape, dtype=dtype, device=device), persistent=False)
        self.register_buffer("v", torch.zeros(shape, dtype=dtype, device=device), persistent=False)

    def write(self, input_pos: Tensor, k: Tensor, v: Tensor) -> None:
        """Write (B or 1, K, S, D) keys and values to the slots `input_pos` (S,)."""
        self.k[:, :, input_pos] = k
        self.v[:, :, input_pos] = v

    def read(self, batch_size: int, length: int) -> tuple[Tensor, Tensor]:
        """Views (batch_size, K, length, D) of the first rows and slots."""
        return self.k[:batch_size, :, :length], self.v[:batch_size, :, :length]


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020): w2(silu(w1 x) * w3 x)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w13 = Linear(config.dim, 2 * config.ffn_dim, bias=False)
        self.w2 = Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., E) in, (..., E) out."""
        gate, up = self.w13(x).chunk(2, dim=-1)
        down: Tensor = self.w2(F.silu(gate) * up)
        return down


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019), the division in float32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) in, the same shape and dtype out."""
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.square().mean(dim=-1, keepdim=True) + self.eps)
        return x32.to(x.dtype) * self.weight


def build_attention_mask(input_pos: Tensor, kv_pos: Tensor, sliding_window: int | None, dtype: torch.dtype) -> Tensor:
    """What to add to the attention scores: (S, N) of `dtype`, 0 where a token may look, else -inf.

    A token sees itself, and padding after the last slot what that slot's token sees, so no row is wholly masked,
    which some attention kernels answer with NaN.
    """
    position = torch.minimum(input_pos, kv_pos[-1])[:, None]
    visible = kv_pos <= position
    if sliding_window is not None:
        visible = visible & (kv_pos > position - sliding_window)
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, -math.inf)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + D/2]) of every head by their position's angles (Su et al. 2021).

    `x` is (B, S, heads, D); `cos` and `sin` are (S, 1, D/2) float32, and the rotation is done in float32.
    """
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def compute_rope_tables(config: ModelConfig, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, each (length, D/2) float32, computed in float64.

    A float32 angle is off by 0.004 at position 100,000, so only the finished tables are rounded.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    frequencies = scale_rope_frequencies(config.rope_theta**-exponents, config.rope_scaling)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
    return angles.cos().float(), angles.sin().float()


def scale_rope_frequencies(frequencies: Tensor, scaling: RopeScaling | None) -> Tensor:
    """Apply a checkpoint's rotary scaling to (D/2,) frequencies in radians per token; see `RopeScaling`.

    `llama3` is the formula of Meta's reference: wavelengths above `original_max_seq_len / low_freq_factor` are
    stretched by `factor`, those below `original_max_seq_len / high_freq_factor` kept, the rest interpolated.
    """
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "factors":
        return frequencies / torch.tensor(scaling.factors, dtype=frequencies.dtype)
    rotations = scaling.original_max_seq_len * frequencies / (2 * math.pi)
    kept = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)
