"""`gptfast inspect`: a model's parameters per component, and whether it fits."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gptfast.cli.tables import format_table

if TYPE_CHECKING:
    from gptfast.config import ModelConfig, RopeScaling
    from gptfast.inspection import Component, MemoryEstimate, ParameterAccount

_KV_TOKENS = 1000


@click.command(name="inspect")
@click.argument("model", metavar="PRESET_OR_PATH")
@click.option("--memory", metavar="SIZE", help="Memory to fit into, such as 24GiB; what is free here if absent.")
@click.option("--kv-dtype", default="bf16", show_default=True, help="Of keys and values: fp32, bf16 or int8.")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON instead of tables.")
def command(model: str, memory: str | None, kv_dtype: str, as_json: bool) -> None:
    """Account for the parameters of a preset or a checkpoint, and tell which context fits."""
    from gptfast.errors import UserError
    from gptfast.inspection import count_parameters, estimate_memory, parse_size
    from gptfast.memory import get_available_host_memory

    available_bytes = get_available_host_memory() if memory is None else parse_size(memory)
    if available_bytes is None:
        raise UserError("this system does not tell how much memory is free; say it with --memory, such as 16GiB")
    config, stored_bytes = _find_model(model)
    account = count_parameters(config)
    estimates = estimate_memory(config, available_bytes, stored_bytes, kv_dtype=kv_dtype)
    if as_json:
        click.echo(json.dumps(_to_json(model, config, account, estimates, available_bytes, kv_dtype)))
        return
    click.echo(_describe_architecture(model, config))
    click.echo()
    click.echo(_format_parameters(config, account))
    click.echo()
    source = "free on this machine" if memory is None else "given"
    click.echo(f"memory: {available_bytes / 2**30:,.1f} GiB {source}, batch size 1, KV cache in {kv_dtype}")
    click.echo()
    click.echo(_format_estimates(estimates, available_bytes))
    click.echo()
    click.echo(_describe_what_is_counted())


def _find_model(model: str) -> tuple[ModelConfig, int | None]:
    """The architecture and, of a checkpoint, the bytes of its weights as stored."""
    from gptfast.checkpoint.presets import PRESETS, get_preset
    from gptfast.errors import CheckpointError

    path = Path(os.path.expanduser(model))
    if model not in PRESETS and path.exists():
        from gptfast.checkpoint import open_checkpoint

        checkpoint = open_checkpoint(path)
        return checkpoint.config, checkpoint.stored_bytes
    try:
        return get_preset(model), None
    except CheckpointError as error:
        raise CheckpointError(f"no such file or directory, and {error}") from None


def _describe_architecture(name: str, config: ModelConfig) -> str:
    heads = f"{config.n_heads} query and {config.n_kv_heads} key/value heads of {config.head_dim}"
    window = f" (sliding window {config.sliding_window:,})" if config.sliding_window is not None else ""
    return (
        f"{name} ({config.architecture})\n"
        f"{config.n_layers} blocks, dim {config.dim:,}, {heads}, ffn_dim {config.ffn_dim:,}\n"
        f"vocabulary {config.vocab_size:,}, context {config.max_seq_len:,} tokens{window}, "
        f"norm_eps {config.norm_eps:g}\n"
        f"rope_theta {config.rope_theta:,.0f}, {_describe_rope_scaling(config.rope_scaling)}"
    )


def _describe_rope_scaling(rope: RopeScaling | None) -> str:
    if rope is None:
        return "RoPE not scaled"
    if rope.kind == "factors":
        return f"scaled RoPE ({len(rope.factors)} stored factors, {rope.factors[0]:g} to {rope.factors[-1]:g})"
    facts = f"{rope.kind}, factor {rope.factor:g}"
    if rope.kind == "llama3":
        facts += f", low {rope.low_freq_factor:g}, high {rope.high_freq_factor:g}"
        facts += f", original context {rope.original_max_seq_len:,}"
    return f"scaled RoPE ({facts})"


def _format_parameters(config: ModelConfig, account: ParameterAccount) -> str:
    rows: list[Sequence[str]] = [("component", "shape", "per block", f"all {config.n_layers} blocks")]
    blocks = [part for part in account.components if part.in_block]
    outside = [part for part in account.components if not part.in_block]
    rows.append(_format_component(account, outside[0]))
    for prefix in ("attention.", "feed_forward."):
        rows += [_format_component(account, part) for part in blocks if part.name.startswith(prefix)]
        rows.append(_format_sum(account, f"  {prefix.rstrip('.')}", prefix))
    rows += [_format_component(account, part) for part in blocks if "." not in part.name]
    rows.append(_format_sum(account, "  block", ""))
    rows += [_format_component(account, part) for part in outside[1:]]
    rows.append(("total", "", "", f"{account.total:,}"))
    return format_table(rows, left_columns=(0, 1))


def _format_component(account: ParameterAccount, component: Component) -> Sequence[str]:
    shape = " x ".join(f"{size:,}" for size in component.shape) or "tied to tok_embeddings"
    per_block = f"{component.count:,}" if component.in_block else ""
    return component.name, shape, per_block, f"{account.count_all(component):,}"


def _format_sum(account: ParameterAccount, label: str, prefix: str) -> Sequence[str]:
    per_block = account.count_in_block(prefix)
    return label, "", f"{per_block:,}", f"{per_block * account.n_layers:,}"


def _format_estimates(estimates: Sequence[MemoryEstimate], available_bytes: int) -> str:
    rows: list[Sequence[str]] = [
        ("weights in", "bits/weight", "weights", f"KV cache per {_KV_TOKENS:,} tokens", "largest context")
    ]
    for estimate in estimates:
        rows.append(
            (
                estimate.precision,
                f"{estimate.bits_per_weight:.2f}",
                f"{estimate.weight_bytes / 1e9:,.3f} GB",
                f"{estimate.kv_bytes_per_token * _KV_TOKENS / 1e6:,.3f} MB",
                _describe_context(estimate, available_bytes),
            )
        )
    return format_table(rows, left_columns=(0, 4))


def _describe_context(estimate: MemoryEstimate, available_bytes: int) -> str:
    if estimate.limited_by == "weights":
        missing = estimate.weight_bytes + estimate.kv_bytes_per_token - available_bytes
        return f"does not fit, {missing / 1e9:,.3f} GB short"
    limit = "the model's limit" if estimate.limited_by == "model" else "all that fits"
    return f"{estimate.max_context_tokens:,} tokens, {limit}"


def _describe_what_is_counted() -> str:
    from gptfast.inspection import PRECISIONS

    lines = ["Counted are weights and KV cache, not activations or the process itself; shapes are out x in."]
    for precision in PRECISIONS:
        if precision.bits is not None:
            span = f"{precision.group_size} weights" if precision.group_size else "row"
            extra = f"{precision.scale_bytes} bytes of scale per {span}"
            lines.append(f"{precision.name}: {precision.bits} bits per weight and {extra}.")
    lines.append(
        "Quantized are the blocks' projections and the output, which always is int8 per channel; norms, biases"
    )
    lines.append("and an untied embedding are bfloat16 then. GB = 1e9, GiB = 2**30 bytes.")
    return "\n".join(lines)


def _to_json(
    name: str,
    config: ModelConfig,
    account: ParameterAccount,
    estimates: Sequence[MemoryEstimate],
    available_bytes: int,
    kv_dtype: str,
) -> dict[str, Any]:
    return {
        "model": name,
        "config": dataclasses.asdict(config),
        "parameters": {
            "components": [
                {
                    "name": part.name,
                    "shape": part.shape,
                    "in_block": part.in_block,
                    "count": part.count,
                    "count_all": account.count_all(part),
                }
                for part in account.components
            ],
            "attention_per_block": account.count_in_block("attention."),
            "feed_forward_per_block": account.count_in_block("feed_forward."),
            "block": account.count_in_block(),
            "total": account.total,
        },
        "memory": {
            "available_bytes": available_bytes,
            "kv_dtype": kv_dtype,
            "estimates": [dataclasses.asdict(estimate) for estimate in estimates],
        },
    }
