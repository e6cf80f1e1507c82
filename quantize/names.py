"""Hugging Face's names of tensors that go by canonical ones in gptfast."""

from __future__ import annotations

from gptfast.checkpoint.hf import CANONICAL_NAMES

HF_NAMES = {ours: theirs for theirs, ours in CANONICAL_NAMES.items()}


def get_module(name: str) -> str:
    """The module that a tensor belongs to: `layers.0.attention.wq` of `layers.0.attention.wq.weight`."""
    return name.rpartition(".")[0]


def get_hf_module(name: str) -> str:
    """Hugging Face's name of that module: `model.layers.0.self_attn.q_proj`, `lm_head`."""
    module = get_module(name)
    if not module.startswith("layers."):
        return HF_NAMES[module]
    _, layer, inner = module.split(".", 2)
    return f"model.layers.{layer}.{HF_NAMES[inner]}"


def get_hf_name(name: str) -> str:
    """Hugging Face's name of the tensor itself."""
    return f"{get_hf_module(name)}.{name.rpartition('.')[2]}"
