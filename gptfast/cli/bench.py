"""`gptfast bench`: how fast a model decodes, against the limit of the machine that it runs on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gptfast.bench.phases import PhaseTimer
from gptfast.cli.bench_startup import command as startup_command
from gptfast.cli.options import (
    checkpoint_option,
    eager_option,
    execution_options,
    json_option,
    random_option,
)
from gptfast.errors import UserError

if TYPE_CHECKING:
    from gptfast.kernels.ops import KernelChoice
    from gptfast.loading import Weights


def parse_counts(_ctx: click.Context, parameter: click.Parameter, text: str) -> tuple[int, ...]:
    """Counts of tokens, separated by commas, in the order given and each once."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise click.BadParameter(f"{text!r} is not a list of numbers such as {parameter.default}")
    return tuple(dict.fromkeys(int(part) for part in parts))


@click.group(name="bench", invoke_without_command=True)
@checkpoint_option
@random_option
@click.option(
    "--prompt-lengths",
    callback=parse_counts,
    default="64,512",
    show_default=True,
    help="Tokens of the prompts that prefill is measured with.",
)
@click.option(
    "--depths",
    callback=parse_counts,
    default="0,512,2048",
    show_default=True,
    help="Tokens in the cache when a decode run begins.",
)
@click.option("--new-tokens", type=int, default=64, show_default=True, help="Tokens of a decode run.")
@click.option("--repeats", type=int, default=15, show_default=True, help="Counted runs of each measurement, in turn.")
@click.option("--batch-size", type=int, default=1, show_default=True, help="Rows decoded at once.")
@click.option("--temperature", type=float, default=0.0, help="Of the end-to-end runs [default: 0, greedy].")
@click.option("--top-k", type=int, help="Of the end-to-end runs.")
@click.option("--top-p", type=float, default=1.0, help="Of the end-to-end runs.")
@eager_option
@execution_options
@click.option("--breakdown", is_flag=True, help="Take a step at the first depth apart; compiles it for that.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw the figures; implies --breakdown.")
@click.option("--csv", "as_csv", is_flag=True, help="Print a CSV row per measurement instead of tables.")
@json_option
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """Measure prefill and decode speed, each against the bandwidth of the machine.

    A figure is a median over --repeats runs with the range that 80 % of them lie in. Loading, compiling and warming up
    are outside the figures.
    """
    if ctx.invoked_subcommand is not None:
        refuse_options_before_subcommand(ctx)
        return
    run_and_print(**options)


command.add_command(startup_command)


def refuse_options_before_subcommand(ctx: click.Context) -> None:
    """Raise UserError for an option that the subcommand would not hear of."""
    for parameter in ctx.command.params:
        if ctx.get_parameter_source(str(parameter.name)) is click.core.ParameterSource.COMMANDLINE:
            raise UserError(
                f"{parameter.opts[0]} stands before {ctx.invoked_subcommand}, which has its own options; put it after"
            )


def run_and_print(
    *,
    checkpoint: str | None,
    preset: str | None,
    prompt_lengths: tuple[int, ...],
    depths: tuple[int, ...],
    new_tokens: int,
    repeats: int,
    batch_size: int,
    temperature: float,
    top_k: int | None,
    top_p: float,
    compile: bool,
    device: str,
    dtype: str | None,
    weights: Weights,
    activations: str | None,
    kv_dtype: str | None,
    kernels: KernelChoice,
    cuda_graphs: str | None,
    step: str,
    pdl: bool,
    threads: int | None,
    breakdown: bool,
    plot: Path | None,
    as_csv: bool,
    as_json: bool,
) -> None:
    """Measure and print; refuse what can be refused before a model is loaded."""
    phases = PhaseTimer()
    with phases.measure("import"):
        from gptfast.bench.export import to_csv, to_json
        from gptfast.bench.measure import check_settings, run_benchmark
        from gptfast.bench.results import Settings
        from gptfast.cli.bench_report import format_benchmark
        from gptfast.session import load

    settings = Settings(
        batch_size=batch_size,
        repeats=repeats,
        new_tokens=new_tokens,
        prompt_lengths=prompt_lengths,
        depths=depths,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
    )
    check_settings(settings)
    if as_csv and as_json:
        raise UserError("both --csv and --json are given; give one of them")
    if as_csv and breakdown:
        raise UserError("--csv has no rows for --breakdown; use --json or --plot for it")
    if plot is not None:
        from gptfast.bench.plot import check_plot_path

        check_plot_path(plot)
    with phases.measure("load"):
        session = load(
            checkpoint,
            preset=preset,
            device=device,
            dtype=dtype,
            weights=weights,
            activations=activations,
            kv_dtype=kv_dtype,
            kernels=kernels,
            cuda_graphs=cuda_graphs,
            step=step,
            pdl=pdl,
            compile=compile,
            batch_size=batch_size,
            threads=threads,
        )
    result = run_benchmark(
        session,
        settings,
        phases,
        breaks_down=breakdown or plot is not None,
        say=lambda line: click.echo(line, err=True),
    )
    if plot is not None:
        from gptfast.bench.plot import draw

        draw(result, plot)
    if as_csv:
        for note in result.notes:
            click.echo(f"note: {note}", err=True)
    click.echo(to_csv(result) if as_csv else format_benchmark(result), nl=not as_csv)
    if as_json:
        click.echo(json.dumps(to_json(result)))
