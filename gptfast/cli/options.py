"""The options that several commands have, so that they read alike everywhere."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])

checkpoint_option = click.option(
    "--checkpoint",
    "--checkpoint-path",
    metavar="PATH",
    help="Model directory or GGUF file [default: SmolLM2-135M-Instruct, fetched once].",
)
random_option = click.option(
    "--random", "preset", metavar="PRESET", help="Random weights in a preset's shapes, such as llama-3.2-1b."
)
compile_option = click.option("--compile", is_flag=True, help="Compile the steps; cached for later starts.")
eager_option = click.option(
    "--compile/--no-compile", default=True, show_default=True, help="Run compiled steps, or eager ones."
)
weights_option = click.option(
    "--weights", default="stored", show_default=True, help="Decode from stored, fp32, bf16, fp8, int8 or int4 weights."
)
activations_option = click.option(
    "--activations", help="fp32, or int8: rounded for quantized weights [default: int8 where there are such]."
)
kv_dtype_option = click.option(
    "--kv-dtype", help="Of keys and values: fp32, bf16 or int8 [default: --dtype, or bf16 without it]."
)
EXECUTION_OPTIONS = (
    click.option("--device", default="auto", show_default=True, help="cpu, cuda or auto."),
    click.option("--dtype", help="Of activations: float32, bfloat16 or float16 [default: the fastest on the device]."),
    weights_option,
    activations_option,
    kv_dtype_option,
    click.option(
        "--kernels",
        default="auto",
        show_default=True,
        help="What multiplies: auto (ours) or, on CUDA, triton (ours), inductor (torch.compile's) or torchao.",
    ),
    click.option(
        "--cuda-graphs",
        help="manual (ours, one graph a step), trees (torch.compile's) or off [default: manual, of compiled steps].",
    ),
    click.option(
        "--step",
        default="auto",
        show_default=True,
        help="Of decoding on CUDA: compiled, fused (five kernels of ours a layer), or what was found faster there.",
    ),
    click.option(
        "--pdl/--no-pdl",
        default=True,
        show_default=True,
        help="Have the fused step's kernels begin before those ahead of them end.",
    ),
    click.option("--threads", type=int, help="CPU threads [default: torch's choice]."),
)


def parse_token_count(_context: click.Context, _option: click.Parameter, value: str | None) -> int | None:
    """A number of tokens, None for `auto`; a usage error for anything else."""
    if value is None or value == "auto":
        return None
    try:
        return int(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is neither a number of tokens nor auto") from None


speculate_k_option = click.option(
    "--speculate-k",
    callback=parse_token_count,
    metavar="K|auto",
    help="Tokens to propose in every round [default: auto, as many as pay].",
)
SPECULATION_OPTIONS = (
    click.option(
        "--draft",
        "--draft-checkpoint",
        "--draft-checkpoint-path",
        "draft",
        metavar="WHAT",
        help="Speculate with ngram, a checkpoint, int4 or int8 (the model itself), layers:N, or ngram,WHAT.",
    ),
    speculate_k_option,
)
json_option = click.option("--json", "as_json", is_flag=True, help="End standard output with one line of JSON.")


def speculation_options(command: Command) -> Command:
    """Give a command the options that say what proposes tokens, named as `load` names them."""
    return functools.reduce(lambda wrapped, option: option(wrapped), reversed(SPECULATION_OPTIONS), command)


def execution_options(command: Command) -> Command:
    """Give a command the options that say on what and in which precision a model runs, named as `load` names them."""
    return functools.reduce(lambda wrapped, option: option(wrapped), reversed(EXECUTION_OPTIONS), command)
