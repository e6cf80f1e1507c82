"""Writes quantized Hugging Face directories with the compressed-tensors library itself."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gptfast.config import ModelConfig
from tests.reference.checkpoints import hf_name, write_hf


def weights_args(bits: int, group_size: int | None = None, *, symmetric: bool = True, **changes: Any) -> dict[str, Any]:
    """`weights` of a config group; one scale per channel if there is no group size."""
    return {
        "num_bits": bits,
        "type": "int",
        "strategy": "channel" if group_size is None else "group",
        "group_size": group_size,
        "symmetric": symmetric,
    } | changes


def write_compressed(
    directory: Path,
    weights: Mapping[str, Tensor],
    config: ModelConfig,
    groups: Mapping[str, Mapping[str, Any]],
    *,
    ignore: Collection[str] = (),
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
) -> dict[str, Tensor]:
    """Write a model whose linear layers the library quantized, and return what it holds: canonical names, float32.

    `groups` is the library's `config_groups`. The codes that are returned expanded are those before packing.
    """
    import transformers
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    dense = write_hf(directory.parent / f"{directory.name}-dense", weights, config, dtype=dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(dense, dtype=dtype, local_files_only=True)
    settings = QuantizationConfig(config_groups=dict(groups), ignore=list(ignore))
    apply_quantization_config(model, settings, show_progress=False)
    modules = dict(model.named_modules())
    held = {}
    for name in weights:
        module_name, _, kind = hf_name(name).rpartition(".")
        module = modules[module_name]
        is_quantized = kind == "weight" and hasattr(module, "quantization_scheme")
        held[name] = _round(module) if is_quantized else getattr(module, kind).detach().float()
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    compressor.update_config(str(directory))
    return held


def _round(module: nn.Module) -> Tensor:
    """Set scales and zeros of a module by the extremes of its weights; its weights rounded, in float32.

    Activations that are to be rounded by a scale of their own get 1.
    """
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    args: Any = module.quantization_scheme.weights
    weight: Tensor = module.weight.detach()
    rows, columns = weight.shape
    is_one_group = args.strategy == "tensor"
    grouped = weight.reshape(1, 1, -1) if is_one_group else weight.reshape(rows, -1, args.group_size or columns)
    scales, zeros = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args)
    for name, value in (("weight_scale", scales), ("weight_zero_point", zeros)):
        parameter: Tensor = getattr(module, name)
        parameter.data = value.reshape(parameter.shape).to(parameter.dtype)
    if hasattr(module, "input_scale"):
        module.input_scale.data.fill_(1)
    scale, zero = (getattr(module, name).detach() for name in ("weight_scale", "weight_zero_point"))
    codes = quantize(
        weight, scale, zero, args, dtype=args.pytorch_dtype() if args.type == "float" else torch.int8
    ).float()
    repeats = 1 if is_one_group else columns // scale.shape[1]
    return (codes - zero.float().repeat_interleave(repeats, -1)) * scale.float().repeat_interleave(repeats, -1)
