"""The options that several commands have, so that they read alike everywhere."""

from __future__ import annotations

import click

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
device_option = click.option("--device", default="auto", show_default=True, help="cpu, cuda or auto.")
dtype_option = click.option("--dtype", help="float32, bfloat16 or float16 [default: the fastest on the device].")
threads_option = click.option("--threads", type=int, help="CPU threads [default: torch's choice].")
json_option = click.option("--json", "as_json", is_flag=True, help="End standard output with one line of JSON.")
