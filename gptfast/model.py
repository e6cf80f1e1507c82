"""The model: a Llama-family decoder with a static KV cache, in one file.

It covers Llama 1 to 3.2, SmolLM2, Mistral, Qwen2, Qwen2.5 and Qwen3; what differs between them is data in
`ModelConfig`. Parameter names are those of Meta's reference, with the projections that read the same input
fused: `wqkv` and `w13`.

Shapes: B batch, S tokens in this call, L cache length, N cache slots attended in this call,
H query heads, K key/value heads, G = H / K query heads that share one, D head_dim, E dim, V vocabulary.
"""

from __future__ import annotations

import math
from collections import Counter

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptfast.config import ModelConfig, RopeScaling
from gptfast.kernels import ops
from gptfast.kernels.ops import Kernels
from gptfast.linear import Embedding, PackedEmbedding, PackedLinear, TritonEmbedding, TritonLinear

FUSED_PROJECTIONS = {"wqkv": ("wq", "wk", "wv"), "w13": ("w1", "w3")}
"""Which rows, in which order, a fused projection is made of."""


class Transformer(nn.Module):
    """Token ids in, next-token logits out. Call `setup_caches` before the first forward pass."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.queries_per_kv_head = config.n_heads // config.n_kv_heads
        self.sliding_window = config.sliding_window
        self.kernels: Kernels | None = None
        self.tok_embeddings = Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(TransformerBlock(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = None if config.tie_word_embeddings else nn.Linear(config.dim, config.vocab_size, bias=False)
        self.rope_cos: Tensor
        self.rope_sin: Tensor

    @property
    def dtype(self) -> torch.dtype:
        """What activations are computed in; weights may be held in another one."""
        return self.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.norm.weight.device

    def set_kernels(self, kernels: Kernels | None) -> None:
        """Have these attend wherever they can, instead of torch's own operators."""
        self.kernels = kernels
        for module in self.modules():
            if isinstance(module, Attention):
                module.kernels = kernels

    def setup_caches(self, batch_size: int, max_seq_len: int, dtype: torch.dtype | None = None) -> None:
        """Allocate zeroed KV caches and rotary tables for positions 0 to `max_seq_len` - 1.

        The caches are of `dtype`, which may be int8, or of the model's; earlier ones are dropped, and with them what
        they held.
        """
        for module in self.modules():
            if isinstance(module, Attention):
                module.setup_cache(batch_size, max_seq_len, dtype=dtype or self.dtype, device=self.device)
        cos, sin = compute_rope_tables(self.config, max_seq_len)
        self.register_buffer("rope_cos", cos.to(self.device), persistent=False)
        self.register_buffer("rope_sin", sin.to(self.device), persistent=False)

    @property
    def flashes(self) -> bool:
        """Whether long chunks attend by torch's flash attention: on CUDA, in 16 bits and without a window."""
        has_flash = ops.are_for_cuda(self.kernels) and self.device.type == "cuda" and self.dtype.itemsize == 2
        return has_flash and self.sliding_window is None and self.config.head_dim % 8 == 0

    @property
    def rounds_inputs(self) -> bool:
        """Whether any product rounds its activations to int8."""
        packed = (module for module in self.modules() if isinstance(module, PackedLinear | PackedEmbedding))
        return any(module.rounds_inputs for module in packed)

    def list_weight_precisions(self) -> list[str]:
        """What matrices are held in, the most bytes first; of an embedding that is not the head too, nothing."""
        sizes: Counter[str] = Counter()
        for name, module in self.named_modules():
            if name == "tok_embeddings" and self.output is not None:
                continue
            if isinstance(module, PackedLinear | PackedEmbedding | TritonLinear | TritonEmbedding):
                for precision, weight in module.list_matrices():
                    sizes[precision] += weight.nbytes
            elif isinstance(module, nn.Linear | nn.Embedding):
                sizes[describe_dtype(module.weight.dtype)] += module.weight.nbytes
        return [precision for precision, _ in sizes.most_common()]

    def list_caches(self) -> list[KVCache]:
        """The layers' caches, first layer first; none before `setup_caches`."""
        return [module for module in self.modules() if isinstance(module, KVCache)]

    def count_weight_bytes_per_token(self) -> int:
        """Bytes of weights that one decode step reads; of an embedding that is not the head too, one row."""
        held = sum(parameter.nbytes for parameter in self.parameters())
        if self.output is None:
            return held
        embedding = sum(parameter.nbytes for parameter in self.tok_embeddings.parameters())
        return held - embedding + embedding // self.config.vocab_size

    def forward(self, tokens: Tensor, input_pos: Tensor, kv_pos: Tensor | None, rows: Tensor | None = None) -> Tensor:
        """Compute logits and write the tokens' keys and values into the cache.

        Args:
            tokens: (B, S) int64. With B = 1 and a larger cache, every row of the cache is filled alike.
            input_pos: (S,) int64, the tokens' positions, which are also the cache slots they are written to.
            kv_pos: (N,) int64, the slots 0 to N-1 to attend over; a token never sees a slot after its own. The
                attention kernel does not need it; for a model that `flashes`, the last of more tokens than that
                kernel takes stands in slot N-1.
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
        mask = None
        if ops.can_attend(self.kernels, tokens.shape[1]):
            kv_pos = None
        elif not self.flashes:
            assert kv_pos is not None
            mask = build_attention_mask(input_pos, kv_pos, self.sliding_window, x.dtype)
            mask = mask.repeat(self.queries_per_kv_head, 1)
        added = torch.zeros_like(x)
        for layer in self.layers:
            x, added = layer(x, added, cos, sin, mask, input_pos, kv_pos)
        x = x + added
        if rows is not None:
            x = x[:, rows]
        x = self.norm(x)
        logits: Tensor = self.tok_embeddings.project(x) if self.output is None else self.output(x)
        return logits.float()


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
    def forward(
        self,
        x: Tensor,
        added: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None,
        input_pos: Tensor,
        kv_pos: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """The residual stream (B, S, E) and what the block before has yet to add to it in, the same out.

        So that the sum is computed in one kernel with the norm that follows it, which the region's end would part. See
        `Transformer.forward` and `build_attention_mask` for the rest.
        """
        x = x + added
        x = x + self.attention(self.attention_norm(x), cos, sin, mask, input_pos, kv_pos)
        return x, self.feed_forward(self.ffn_norm(x))


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023) over a static cache."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = config.n_heads, config.n_kv_heads, config.head_dim
        q_dim, kv_dim = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        self.kernels: Kernels | None = None
        self.sliding_window = config.sliding_window
        self.split_sizes = [q_dim, kv_dim, kv_dim]
        self.wqkv = nn.Linear(config.dim, q_dim + 2 * kv_dim, bias=config.qkv_bias)
        self.wo = nn.Linear(q_dim, config.dim, bias=config.output_bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.kv_cache: KVCache

    def setup_cache(self, batch_size: int, max_seq_len: int, *, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate this layer's cache; see `Transformer.setup_caches`."""
        shape = (batch_size, self.n_kv_heads, max_seq_len, self.head_dim)
        self.kv_cache = KVCache(shape, dtype=dtype, device=device)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, input_pos: Tensor, kv_pos: Tensor | None
    ) -> Tensor:
        """(B, S, E) in, (B, S, E) out; without a mask by flash attention, and without `kv_pos` by the kernel."""
        B, S, _ = x.shape
        H, K, D = self.n_heads, self.n_kv_heads, self.head_dim
        q, k, v = self.wqkv(x).split(self.split_sizes, dim=-1)
        q, k, v = q.view(B, S, H, D), k.view(B, S, K, D), v.view(B, S, K, D)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        self.kv_cache.write(input_pos, k.transpose(1, 2), v.transpose(1, 2))
        if mask is not None:
            y = self.attend(q, mask)
        elif kv_pos is not None:
            y = self.flash(q, kv_pos.shape[0])
        else:
            y = self.attend_by_kernel(q, input_pos)
        projected: Tensor = self.wo(y)
        return projected

    def attend_by_kernel(self, q: Tensor, input_pos: Tensor) -> Tensor:
        """(B, S, H, D) in, (B, S, H * D) out: every token over the slots up to its own, and no other is read."""
        assert self.kernels is not None
        cache = self.kv_cache
        return ops.attention(
            q,
            cache.k,
            cache.v,
            input_pos,
            k_scales=cache.k_scales,
            v_scales=cache.v_scales,
            sliding_window=self.sliding_window,
            kernels=self.kernels,
        )

    def flash(self, q: Tensor, length: int) -> Tensor:
        """(B, S, H, D) in, (B, S, H * D) out: over the first slots, in the last of which the last token stands."""
        keys, values = self.kv_cache.read(q.shape[0], length, q.dtype)
        # To this operator, other than to the function above it, causal means that both ends meet.
        flash = torch.ops.aten._scaled_dot_product_flash_attention.default
        y: Tensor = flash(q.transpose(1, 2), keys, values, 0.0, True)[0]
        return y.transpose(1, 2).flatten(2)

    def attend(self, q: Tensor, mask: Tensor) -> Tensor:
        """(B, S, H, D) in, (B, S, H * D) out: over as many slots as the mask (G * S, N) has columns."""
        B, S, H, D = q.shape
        K = self.n_kv_heads
        keys, values = self.kv_cache.read(B, mask.shape[-1], q.dtype)
        # The G query heads that share a key/value head become G * S rows of one product with it, so the
        # cache is read once, as it lies, and never repeated.
        q = q.view(B, S, K, H // K, D).permute(0, 2, 3, 1, 4).reshape(B, K, -1, D)
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        return y.view(B, K, H // K, S, D).permute(0, 3, 1, 2, 4).reshape(B, S, H * D)


class KVCache(nn.Module):
    """Keys and values of all positions so far: buffers (B, K, L, D) that never move.

    Of int8, every slot and head has a scale, in (B, K, L, 1) float32 beside them. Slots are overwritten, not cleared:
    a slot after the current position holds zeros or what an earlier, longer text left there, always finite, and is
    not looked at.
    """

    def __init__(self, shape: tuple[int, int, int, int], *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.k: Tensor
        self.v: Tensor
        self.k_scales: Tensor | None
        self.v_scales: Tensor | None
        for name in ("k", "v"):
            self.register_buffer(name, torch.zeros(shape, dtype=dtype, device=device), persistent=False)
            scales = torch.zeros(*shape[:-1], 1, device=device) if dtype == torch.int8 else None
            self.register_buffer(f"{name}_scales", scales, persistent=False)

    def write(self, input_pos: Tensor, k: Tensor, v: Tensor) -> None:
        """Write (B or 1, K, S, D) keys and values to the slots `input_pos` (S,)."""
        if self.k_scales is not None and self.v_scales is not None:
            k, self.k_scales[:, :, input_pos] = round_to_int8(k)
            v, self.v_scales[:, :, input_pos] = round_to_int8(v)
        self.k[:, :, input_pos] = k.to(self.k.dtype)
        self.v[:, :, input_pos] = v.to(self.v.dtype)

    def read(self, batch_size: int, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(batch_size, K, length, D) of the first rows and slots in `dtype`: views, where they are held in it."""
        k, v = self.k[:batch_size, :, :length].to(dtype), self.v[:batch_size, :, :length].to(dtype)
        if self.k_scales is not None and self.v_scales is not None:
            k = k * self.k_scales[:batch_size, :, :length].to(dtype)
            v = v * self.v_scales[:batch_size, :, :length].to(dtype)
        return k, v


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020): w2(silu(w1 x) * w3 x)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w13 = nn.Linear(config.dim, 2 * config.ffn_dim, bias=False)
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=False)

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


def describe_dtype(dtype: torch.dtype) -> str:
    """Its name without the module: `bfloat16`."""
    return str(dtype).removeprefix("torch.")


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


def round_to_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (..., D) int8 and scales (..., 1) float32 whose product is x to within half a scale."""
    x = x.float()
    scales = x.abs().amax(dim=-1, keepdim=True) / 127
    return (x / scales.clamp(min=torch.finfo(torch.float32).tiny)).round().to(torch.int8), scales


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
