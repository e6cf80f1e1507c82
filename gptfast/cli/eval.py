"""`gptfast eval`: how well a model predicts a text, and how it does on the tasks of EleutherAI's harness."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gptfast.cli.options import (
    checkpoint_option,
    compile_option,
    execution_options,
    json_option,
)
from gptfast.errors import UserError

if TYPE_CHECKING:
    from gptfast.evaluation.comparison import Comparison
    from gptfast.evaluation.text import Text, Window

DEFAULT_TOKENS = 16_384
DEFAULT_WINDOW = 1024
BAR_SWITCHES = ("TQDM_DISABLE", "HF_DATASETS_DISABLE_PROGRESS_BARS", "HF_HUB_DISABLE_PROGRESS_BARS")
"""The environment variables that keep the progress bars of the harness and its libraries off; read at their import."""


@click.group(name="eval")
def command() -> None:
    """Measure what a model knows: perplexity of a text, or tasks of EleutherAI's harness."""


def refuse_random(_ctx: click.Context, _parameter: click.Parameter, preset: str | None) -> None:
    """Raise UserError: the other commands have this option, and here it could mean nothing."""
    if preset is not None:
        raise UserError(f"random weights for {preset} have no tokenizer; evaluate a --checkpoint")


SESSION_OPTIONS = (
    checkpoint_option,
    click.option("--random", hidden=True, expose_value=False, callback=refuse_random),
    compile_option,
    execution_options,
    json_option,
)


def add_session_options(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that say which model runs, and how."""
    return functools.reduce(lambda wrapped, option: option(wrapped), reversed(SESSION_OPTIONS), function)


@command.command(name="perplexity")
@add_session_options
@click.option(
    "--against",
    metavar="PATH",
    help="A base of the same tokenizer: adds KL, agreement and differences "
    "[default: with an option of the base, the same checkpoint].",
)
@click.option("--against-weights", help="As --weights, of the base [default: stored].")
@click.option("--against-activations", help="As --activations, of the base [default: the model's].")
@click.option("--against-kv-dtype", help="As --kv-dtype, of the base [default: the model's].")
@click.option(
    "--text", "text_file", metavar="FILE", help="UTF-8; - is standard input [default: topics of Python's help]."
)
@click.option("--tokens", type=int, default=DEFAULT_TOKENS, show_default=True, help="Read at most so many tokens.")
@click.option("--window", type=int, default=DEFAULT_WINDOW, show_default=True, help="Tokens in a window.")
@click.option("--stride", type=int, help="Tokens from one window to the next [default: half a window].")
def perplexity(
    checkpoint: str | None,
    against: str | None,
    against_weights: str | None,
    against_activations: str | None,
    against_kv_dtype: str | None,
    text_file: str | None,
    tokens: int,
    window: int,
    stride: int | None,
    as_json: bool,
    **settings: Any,
) -> None:
    """Perplexity of a text, and what separates a model from a base, which may be itself in another precision.

    Each window is read from its first token on, and its tokens that no window before it scored are scored.
    """
    from gptfast.cli.eval_report import describe_session, format_perplexity, to_json
    from gptfast.evaluation.comparison import compare_models, encode_for_both
    from gptfast.evaluation.perplexity import check_window, encode_text, measure_perplexity
    from gptfast.evaluation.text import check_windows, plan_windows
    from gptfast.session import load

    stride = max(1, window // 2) if stride is None else stride
    check_windows(tokens, window, stride)
    text = read_text(text_file)
    session = load(checkpoint, **settings)
    own = {"weights": against_weights, "activations": against_activations, "kv_dtype": against_kv_dtype}
    base = None
    if against is not None or any(value is not None for value in own.values()):
        inherited = settings | {"weights": "stored", "kernels": "auto", "step": "auto"}
        base = load(against or checkpoint, **inherited | {name: value for name, value in own.items() if value})
    for each in (session,) if base is None else (session, base):
        check_window(each, window)
    text_ids = encode_text(session, text.content) if base is None else encode_for_both(session, base, text.content)
    ids = text_ids[:tokens]
    windows = plan_windows(len(ids), window, stride)
    comparison: Comparison | None = None
    with show_progress(windows) as watched:
        if base is None:
            result = measure_perplexity(session, ids, watched)
        else:
            result, comparison = compare_models(session, base, ids, watched)
    facts = describe_session(session) | {
        "against": None if base is None else str(base.checkpoint.path),
        "against_weights": None if base is None else base.weights,
        "against_activations": None if base is None else base.activations,
        "against_kv_dtype": None if base is None else base.kv_dtype,
        "text": text.name,
        "text_sha256": text.sha256,
        "text_tokens": len(text_ids),
        "tokens": len(ids),
        "window_tokens": window,
        "stride_tokens": stride,
        "windows": len(windows),
        "scored_tokens": sum(each.stop - each.first for each in windows),
    }
    click.echo(format_perplexity(facts, result, comparison))
    if as_json:
        click.echo(json.dumps(facts | to_json(result, comparison)))


@command.command(name="lm-eval")
@add_session_options
@click.option("--tasks", required=True, metavar="NAMES", help="Tasks, groups or tags of the harness, with commas.")
@click.option("--limit", type=click.IntRange(min=1), help="Ask only the first so many questions of each task.")
@click.option("--num-fewshot", type=click.IntRange(min=0), help="Solved examples before each [default: the task's].")
@click.option(
    "--include-path",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A directory of further task files.",
)
def lm_eval(
    checkpoint: str | None,
    tasks: str,
    limit: int | None,
    num_fewshot: int | None,
    include_path: Path | None,
    as_json: bool,
    **settings: Any,
) -> None:
    """Tasks of EleutherAI's lm-evaluation-harness, which `pip install "gptfast[lm-eval]"` brings.

    Data that is not on this machine is fetched from the Hugging Face hub.
    """
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise UserError("--tasks names no task; give one or several, with commas between them")
    if not is_watched():
        os.environ.update(dict.fromkeys(BAR_SWITCHES, "1"))
    from gptfast.cli.eval_report import describe_model, describe_session, format_metrics
    from gptfast.evaluation.harness import load_tasks, run_tasks
    from gptfast.session import load

    selection = load_tasks(names, include_path)
    session = load(checkpoint, **settings)
    metrics = run_tasks(session, selection, limit=limit, num_fewshot=num_fewshot)
    facts = describe_session(session) | {"lm_eval": version("lm_eval"), "limit": limit}
    click.echo(f"{describe_model(facts)}\n\n{format_metrics(metrics)}")
    if as_json:
        click.echo(json.dumps(facts | {"metrics": [dataclasses.asdict(each) for each in metrics]}))


def read_text(file: str | None) -> Text:
    """The text of a file, of standard input for `-`, or the default one."""
    from gptfast.cli.generate import decode_utf8
    from gptfast.evaluation.text import Text, read_default_text

    if file is None:
        return read_default_text()
    if file != "-":
        return Text(file, decode_utf8(Path(file).read_bytes(), file))
    if sys.stdin is None:
        raise UserError("standard input is closed; give a file with --text")
    return Text("standard input", decode_utf8(sys.stdin.buffer.read(), "standard input"))


def is_watched() -> bool:
    """Whether standard error is a terminal, where a progress bar is of use."""
    return sys.stderr is not None and sys.stderr.isatty()


@contextlib.contextmanager
def show_progress(windows: Sequence[Window]) -> Iterator[Iterable[Window]]:
    """The windows, with a bar that advances as they are taken."""
    if not is_watched():
        yield windows
        return
    with click.progressbar(windows, label="windows", file=sys.stderr) as bar:
        yield bar
