"""`python quantize.py`: parse, convert, print."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click

from gptfast.cli.options import checkpoint_option, json_option
from gptfast.errors import UserError

if TYPE_CHECKING:
    from gptfast.quantization import WeightScheme
    from quantize.convert import Mode

MODES = ("fp8", "int8", "int4", "int4-hqq", "int4-gptq")
GROUPS = ("32", "64", "128", "channel")
SKIPPED = 1
"""The exit code where layers stayed dense that were to be rounded."""


@click.command()
@click.option("--mode", type=click.Choice(MODES), required=True, help="fp8, int8 and int4 round to nearest.")
@click.option(
    "--group-size", type=click.Choice(GROUPS), help="Inputs that share a scale [default: 32; channel for int8 and fp8]."
)
@click.option("--symmetric/--asymmetric", default=True, show_default=True, help="Asymmetric groups have a zero.")
@click.option(
    "--keep",
    multiple=True,
    metavar="TARGET=PRECISION",
    help="Store layers as int8, fp8, bf16 or fp32: a module's name or re:PATTERN. Repeatable "
    "[default: lm_head=int8 with fp8 and symmetric int4].",
)
@click.option(
    "--calibration",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="UTF-8 text for int4-gptq [default: topics of Python's help].",
)
@click.option("--allow-skip", is_flag=True, help="Exit with 0 although layers had to stay dense.")
@checkpoint_option
@click.option("--output", type=click.Path(path_type=Path), help="A new directory [default: named after all of this].")
@json_option
def command(
    mode: Mode,
    group_size: str | None,
    symmetric: bool,
    keep: tuple[str, ...],
    calibration: Path | None,
    allow_skip: bool,
    checkpoint: str | None,
    output: Path | None,
    as_json: bool,
) -> int:
    """Round a checkpoint's weights and write it in the compressed-tensors format.

    Takes whatever gptfast opens: a Hugging Face directory, Meta's layout, a GGUF file. Needs no GPU. The result opens
    in gptfast and transformers, and follows the schema that vLLM reads. Exits with 1 if a layer had to stay dense.
    """
    from gptfast.checkpoint import open_checkpoint
    from quantize.calibration import read_calibration_ids
    from quantize.convert import Settings, convert, list_warnings, refuse_compressed
    from quantize.plan import list_default_rules, make_plan, parse_keep_rule
    from quantize.report import format_report
    from quantize.writer import list_partials

    if calibration is not None and mode != "int4-gptq":
        raise UserError(f"mode {mode} reads no calibration text; use --mode int4-gptq or leave out --calibration")
    scheme = choose_scheme(mode, group_size, symmetric)
    rules = [*list_default_rules(scheme), *map(parse_keep_rule, keep)]
    path = choose_checkpoint(checkpoint)
    source = open_checkpoint(path)
    refuse_compressed(source)
    plan = make_plan(source, scheme, rules)
    settings = Settings(mode, scheme, read_calibration_ids(source, calibration) if mode == "int4-gptq" else None)
    for line in list_warnings(plan, settings):
        click.echo(f"warning: {line}", err=True)
    output = output or Path(name_output(path, mode, scheme))
    if partials := list_partials(output):
        names = ", ".join(map(str, partials))
        click.echo(f"warning: an earlier run left {names}; remove it, unless that run still goes on", err=True)
    with notice_signals(), show_progress(len(plan.rounded)) as advance:
        report = convert(source, output, plan, settings, advance)
    click.echo(format_report(report))
    click.echo(f'run it with: python generate.py --checkpoint "{output}"', err=True)
    if as_json:
        click.echo(json.dumps(report.to_json()))
    if report.skipped and not allow_skip:
        click.echo(
            f"error: {len(report.skipped)} layers stayed dense, see the notes; pass --allow-skip if that is as it "
            "should be",
            err=True,
        )
        return SKIPPED
    return 0


@contextlib.contextmanager
def notice_signals() -> Iterator[None]:
    """Let Ctrl-C end the block as KeyboardInterrupt and SIGTERM as SystemExit, so that it can clear up.

    Also where they come within a library that reports them as an error: torch, called by safetensors, makes a
    ValueError of them.
    """
    ending: BaseException | None = None

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal ending
        ending = KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)
        raise ending

    previous = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except Exception as error:  # of any class: what it is says nothing if a signal caused it
        if ending is not None:
            raise ending from error
        raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def choose_scheme(mode: Mode, group_size: str | None, symmetric: bool) -> WeightScheme:
    """The scheme that the options ask for; raises UserError for groups or zeros of floats."""
    from gptfast.quantization import FLOAT8, WeightScheme

    if mode == "fp8":
        if group_size not in (None, "channel"):
            raise UserError(f"mode fp8 has a scale per channel and no groups of {group_size}; leave out --group-size")
        if not symmetric:
            raise UserError("mode fp8 is of floats, which are symmetric; leave out --asymmetric")
        return FLOAT8
    bits = 8 if mode == "int8" else 4
    group = group_size or ("channel" if bits == 8 else "32")
    return WeightScheme(bits, None if group == "channel" else int(group), symmetric)


def choose_checkpoint(checkpoint: str | None) -> Path:
    """The path that was given, or that of the default model, fetched if need be."""
    if checkpoint is not None:
        return Path(os.path.expanduser(checkpoint))
    from gptfast.download import get_default_model

    return get_default_model()


def name_output(checkpoint: Path, mode: Mode, scheme: WeightScheme) -> str:
    """The default output, in the current directory: `Llama-3.2-1B-int4-g32`."""
    path = checkpoint.resolve()
    name = path.name if path.is_dir() else path.stem
    group = "channel" if scheme.group_size is None else f"g{scheme.group_size}"
    return f"{name}-{mode}-{group}{'' if scheme.symmetric else '-asymmetric'}"


@contextlib.contextmanager
def show_progress(total: int) -> Iterator[Callable[[str], None]]:
    """What is to be told each layer that is done: a bar on standard error, silent where that is no terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda name: None
        return
    with click.progressbar(length=total, label="rounding", item_show_func=str, file=sys.stderr) as bar:
        yield lambda name: bar.update(1, name)
