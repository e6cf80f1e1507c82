"""Write `config.json`: the architecture as Hugging Face spells it, and which layers are rounded how."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from gptfast.checkpoint.compressed_tensors import FLOAT_FORMAT, PACKED_FORMAT, PATTERN_PREFIX, QUANT_METHOD
from gptfast.config import ModelConfig, RopeScaling
from gptfast.errors import CheckpointError
from gptfast.model import scale_rope_frequencies
from gptfast.quantization import WeightScheme
from quantize.names import get_hf_module
from quantize.plan import Plan, PlannedTensor

CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
MIXED_FORMATS = "mixed-precision"
"""What the library calls the format of a whole whose groups differ in theirs."""
FLOAT32_ACCURACY = 1e-5
"""Relative: what is left of float32 after llama.cpp's converter took differences of rotations."""


def make_hf_config(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` of a model, in the spelling of transformers 4, which 5 and vLLM read too.

    `gptfast.checkpoint.hf_config.parse_config` makes the same ModelConfig of it, but for what has two names: a llama
    with a sliding window is written as the mistral that it is, and rotary factors as the rule that they follow.
    Raises CheckpointError for rotary factors that no rule gives.
    """
    architecture = config.architecture
    if architecture == "llama" and config.sliding_window is not None:
        architecture = "mistral"
    if config.output_bias and architecture not in ("llama", "qwen3"):
        raise CheckpointError(
            f"a model with biases in its output projections and a sliding window of {config.sliding_window} is none "
            "that Hugging Face's config can describe; use another checkpoint"
        )
    return {
        "architectures": [CLASSES[architecture]],
        "model_type": architecture,
        "hidden_act": "silu",
        "hidden_size": config.dim,
        "intermediate_size": config.ffn_dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": make_rope_scaling(config),
        "attention_bias": config.output_bias,
        "mlp_bias": False,
        "sliding_window": config.sliding_window,
        "use_sliding_window": config.sliding_window is not None,
        "max_window_layers": 0 if config.sliding_window is not None else config.n_layers,
        "tie_word_embeddings": config.tie_word_embeddings,
        "torch_dtype": "bfloat16",
    }


def make_rope_scaling(config: ModelConfig) -> dict[str, Any] | None:
    """The `rope_scaling` of `config.json`; raises CheckpointError for factors that no rule gives."""
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "factors":
        scaling = recover_rope_scaling(config, scaling.factors)
    if scaling is None:
        return None
    if scaling.kind == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_seq_len,
    }


def recover_rope_scaling(config: ModelConfig, factors: Sequence[float]) -> RopeScaling | None:
    """The rule whose rotary factors a GGUF file stores; raises CheckpointError if it is none of those known.

    Known are no scaling, the linear one, and Llama 3.1's with the low and high frequency factors that Meta publishes
    (1 and 4) and an original context that is a power of two. Its factor is the largest of the stored ones.
    """
    factor = max(factors)
    candidates: list[RopeScaling | None] = [None, RopeScaling("linear", factor=factor)]
    candidates += [
        RopeScaling("llama3", factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=1 << bits)
        for bits in range(8, 21)
    ]
    for candidate in candidates:
        if torch.allclose(
            compute_rope_factors(config, candidate),
            torch.tensor(factors, dtype=torch.float64),
            rtol=FLOAT32_ACCURACY,
            atol=0,
        ):
            return candidate
    raise CheckpointError(
        "the checkpoint stores rotary factors that follow no rule that Hugging Face's config can name; "
        "quantize the Hugging Face directory of the same model"
    )


def compute_rope_factors(config: ModelConfig, scaling: RopeScaling | None) -> torch.Tensor:
    """What the scaling divides each of the (D/2,) rotary frequencies by, float64."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    frequencies = config.rope_theta**-exponents
    return frequencies / scale_rope_frequencies(frequencies, scaling)


def make_quantization_config(plan: Plan) -> dict[str, Any]:
    """The `quantization_config` of compressed-tensors: a group of layers for each way of rounding."""
    schemes: dict[WeightScheme, list[PlannedTensor]] = defaultdict(list)
    for tensor in plan.rounded:
        assert tensor.scheme is not None
        schemes[tensor.scheme].append(tensor)
    ignored = [get_hf_module(tensor.name) for tensor in plan.layers if tensor.scheme is None]
    groups = {
        f"group_{number}": make_config_group(
            scheme, ["Linear"] if len(schemes) == 1 else list_targets(tensors, plan.rounded)
        )
        for number, (scheme, tensors) in enumerate(schemes.items())
    }
    formats = {get_format(scheme) for scheme in schemes}
    return {
        "quant_method": QUANT_METHOD,
        "format": formats.pop() if len(formats) == 1 else MIXED_FORMATS,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ignored,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "sparsity_config": {},
        "transform_config": {},
    }


def make_config_group(scheme: WeightScheme, targets: list[str]) -> dict[str, Any]:
    """One entry of `config_groups`."""
    return {
        "targets": targets,
        "format": get_format(scheme),
        "weights": {
            "num_bits": scheme.bits,
            "type": "float" if scheme.is_float else "int",
            "strategy": "channel" if scheme.group_size is None else "group",
            "group_size": scheme.group_size,
            "symmetric": scheme.symmetric,
            "dynamic": False,
            "actorder": None,
        },
        "input_activations": None,
        "output_activations": None,
    }


def get_format(scheme: WeightScheme) -> str:
    """The format of the tensors that `quantize.packing.pack` makes."""
    return FLOAT_FORMAT if scheme.is_float else PACKED_FORMAT


def list_targets(tensors: Iterable[PlannedTensor], rounded: Iterable[PlannedTensor]) -> list[str]:
    """The targets that match these tensors and no other rounded one.

    A pattern stands for all blocks or for a module of all blocks where that is right, else each layer goes by its
    name: groups never overlap, so no reader has to know which of two would win.
    """
    own = {get_hf_module(tensor.name) for tensor in tensors}
    others = {get_hf_module(tensor.name) for tensor in rounded} - own
    targets: dict[str, None] = {}
    for module in sorted(own):
        patterns = [pattern for pattern in list_patterns(module) if not any(re.match(pattern, name) for name in others)]
        targets[PATTERN_PREFIX + patterns[0] if patterns else module] = None
    return list(targets)


def list_patterns(module: str) -> list[str]:
    """The patterns that match a module of a block, the widest first; none for the head."""
    if "." not in module:
        return []
    inner = re.escape(module.split(".", 3)[3])
    return [r".*layers\..*", rf".*layers\.\d+\.{inner}$"]


def change_hf_config(raw: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """A Hugging Face `config.json` for the rounded model; a head that is rounded is not tied any more."""
    changed = raw if plan.tied_head is not None else raw | {"tie_word_embeddings": False}
    return changed | {"quantization_config": make_quantization_config(plan)}
