"""Which tensors a config implies: the one table that loading, random weights and inspection go by."""

from __future__ import annotations

from gptfast.config import ModelConfig


def list_block_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Canonical names within one block, unfused, with shapes; matrices are (out_features, in_features)."""
    dim, ffn_dim, head_dim = config.dim, config.ffn_dim, config.head_dim
    q_dim, kv_dim = config.n_heads * head_dim, config.n_kv_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "attention.wq.weight": (q_dim, dim),
        "attention.wk.weight": (kv_dim, dim),
        "attention.wv.weight": (kv_dim, dim),
        "attention.wo.weight": (dim, q_dim),
    }
    if config.qkv_bias:
        shapes |= {
            "attention.wq.bias": (q_dim,),
            "attention.wk.bias": (kv_dim,),
            "attention.wv.bias": (kv_dim,),
        }
    if config.output_bias:
        shapes |= {"attention.wo.bias": (dim,)}
    if config.qk_norm:
        shapes |= {"attention.q_norm.weight": (head_dim,), "attention.k_norm.weight": (head_dim,)}
    return shapes | {
        "feed_forward.w1.weight": (ffn_dim, dim),
        "feed_forward.w2.weight": (dim, ffn_dim),
        "feed_forward.w3.weight": (ffn_dim, dim),
        "attention_norm.weight": (dim,),
        "ffn_norm.weight": (dim,),
    }


def list_tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Canonical names of all tensors, unfused, with shapes; a tied head has none of its own."""
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (config.vocab_size, config.dim)}
    block = list_block_shapes(config)
    for layer in range(config.n_layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in block.items()}
    shapes["norm.weight"] = (config.dim,)
    if not config.tie_word_embeddings:
        shapes["output.weight"] = (config.vocab_size, config.dim)
    return shapes
