"""`gptfast bench startup`: how long a process takes to its first token, cold and warm."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from gptfast.cli.options import (
    checkpoint_option,
    eager_option,
    execution_options,
    json_option,
    random_option,
)
from gptfast.cli.tables import format_table
from gptfast.errors import UserError

if TYPE_CHECKING:
    from gptfast.bench.startup import StartupResult, StartupSettings

PARTS = {
    "interpreter": "interpreter_s",
    "import": "import_s",
    "load": "load_s",
    "compile": "compile_s",
    "first step": "first_step_s",
    "first token": "first_token_s",
    "teardown": "teardown_s",
}
NOTE_WIDTH = 100


@click.command(name="startup")
@checkpoint_option
@random_option
@click.option("--prompt-tokens", type=int, default=32, show_default=True, help="Length of the synthetic prompt.")
@click.option("--cold", "cold_starts", type=int, default=1, show_default=True, help="Starts in an empty cache.")
@click.option("--repeats", "warm_starts", type=int, default=5, show_default=True, help="Starts in the usual cache.")
@eager_option
@execution_options
@json_option
def command(as_json: bool, **settings: Any) -> None:
    """Time whole processes from their start to the first token, and part by part.

    A cold start compiles everything in an empty cache, which takes a minute or so.
    """
    from gptfast.bench.startup import StartupSettings, measure_startup

    options = StartupSettings(**settings)
    check_settings(options)
    with ends_as_by_ctrl_c():
        result = measure_startup(options, lambda message: click.echo(message, err=True))
    click.echo(format_result(result))
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(result)))


@contextlib.contextmanager
def ends_as_by_ctrl_c() -> Iterator[None]:
    """Within, a request to end is answered as Ctrl-C is, lest a process that compiles outlives this one."""
    handlers = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def check_settings(settings: StartupSettings) -> None:
    """Refuse what can be refused before a process is started."""
    if settings.prompt_tokens < 1:
        raise UserError(f"prompt-tokens is {settings.prompt_tokens}; it must be at least 1")
    if settings.cold_starts < 0:
        raise UserError(f"cold is {settings.cold_starts}; it must be 0 or more")
    if settings.warm_starts < 1:
        raise UserError(f"repeats is {settings.warm_starts}; it must be at least 1")


def format_result(result: StartupResult) -> str:
    """What was started and where, the table of seconds, and the notes."""
    from gptfast.bench.results import describe_precision
    from gptfast.cli.bench_report import format_environment

    precision = describe_precision(result.dtype, result.weights, result.activations, result.kv_dtype)
    compiled = "compiled" if result.settings.compile else "eager"
    lines = [
        f"{result.model}, {precision}, {compiled}, prompt of {result.settings.prompt_tokens} tokens",
        format_environment(result.environment),
        "",
        format_parts(result),
        "",
        *(textwrap.fill(f"note: {note}", NOTE_WIDTH, subsequent_indent="      ") for note in result.notes),
    ]
    return "\n".join(lines)


def format_parts(result: StartupResult) -> str:
    """A row of seconds per part of a start."""
    cold_title = "cold median" if result.settings.cold_starts > 1 else "cold"
    rows = [("seconds", cold_title, "warm median", "p10", "p90")]
    for title, name in PARTS.items():
        cold = "-" if result.cold is None else f"{getattr(result.cold, name).median:.3f}"
        warm = getattr(result.warm, name)
        rows.append((title, cold, f"{warm.median:.3f}", f"{warm.p10:.3f}", f"{warm.p90:.3f}"))
    return format_table(rows, left_columns=(0,))
