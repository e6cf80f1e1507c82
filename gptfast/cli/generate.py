"""`gptfast generate`: text on standard output, what was measured on standard error."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import secrets
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gptfast.cli.options import (
    checkpoint_option,
    compile_option,
    execution_options,
    json_option,
    random_option,
    speculation_options,
)
from gptfast.config import SamplingConfig
from gptfast.errors import PromptError, UserError

if TYPE_CHECKING:
    from gptfast.cli.report import RunReport
    from gptfast.generation import GenerationResult, Prompt, Stream
    from gptfast.kernels.ops import KernelChoice
    from gptfast.loading import Weights
    from gptfast.session import Session

DEFAULT_QUESTION = "What is the capital of France, and what is it known for?"
DEFAULT_TEXT = "The history of the Roman Empire begins with"
SYNTHETIC_TOKENS = 32
INTERRUPTED = 130
DIVERGED = 1


@dataclass(frozen=True)
class Options:
    """The command line."""

    checkpoint: str | None
    preset: str | None
    prompt: str | None
    prompt_file: str | None
    chat: bool
    system: str | None
    interactive: bool
    max_new_tokens: int | None
    stop: tuple[str, ...]
    ignore_eos: bool
    num_samples: int
    batch_size: int
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    seed: int | None
    compile: bool
    compile_prefill: bool
    device: str
    dtype: str | None
    weights: Weights
    activations: str | None
    kv_dtype: str | None
    kernels: KernelChoice
    cuda_graphs: str | None
    step: str
    pdl: bool
    threads: int | None
    draft: str | None
    speculate_k: int | None
    check_exact: bool
    profile: Path | None
    as_json: bool

    @property
    def chats(self) -> bool:
        """Whether the prompt is asked to go through the chat template."""
        return self.chat or self.system is not None

    def change(self, sampling: SamplingConfig) -> SamplingConfig:
        """The checkpoint's own sampling with what the command line says instead."""
        names = [field.name for field in dataclasses.fields(SamplingConfig)]
        return dataclasses.replace(
            sampling, **{name: getattr(self, name) for name in names if getattr(self, name) is not None}
        )


@click.command(name="generate")
@checkpoint_option
@random_option
@click.option(
    "--prompt",
    metavar="TEXT",
    help="Text to complete; - reads standard input; a number makes a synthetic prompt of that many tokens.",
)
@click.option("--prompt-file", metavar="FILE", help="Complete the text of a file; - is standard input.")
@click.option("--chat", is_flag=True, help="Put the prompt through the model's chat template.")
@click.option("--system", metavar="TEXT", help="A system message; implies --chat.")
@click.option("--interactive", is_flag=True, help="Chat over several turns; Ctrl-D ends it.")
@click.option("--max-new-tokens", type=int, help="At most so many tokens [default: 256].")
@click.option("--stop", multiple=True, metavar="TEXT", help="End the text where this occurs; may be repeated.")
@click.option("--ignore-eos", is_flag=True, help="Go on after an end-of-sequence token, to measure speed.")
@click.option("--num-samples", type=int, default=1, show_default=True, help="Generate so many texts.")
@click.option("--batch-size", type=int, default=1, show_default=True, help="Decode so many of them at once.")
@click.option("--temperature", type=float, help="0 is greedy [default: what the checkpoint asks for, else 0].")
@click.option("--top-k", type=int, help="Sample from the k likeliest tokens; 0 from all.")
@click.option("--top-p", type=float, help="Sample from the likeliest tokens that make up this probability.")
@click.option("--min-p", type=float, help="Leave out tokens less likely than this share of the likeliest.")
@click.option("--repetition-penalty", type=float, help="Above 1, tokens seen before become less likely.")
@click.option("--seed", type=int, help="The same seed gives the same text [default: a new one, printed].")
@compile_option
@click.option(
    "--compile-prefill", is_flag=True, hidden=True, help="Accepted for gpt-fast's users: --compile does both."
)
@execution_options
@speculation_options
@click.option("--check-exact", is_flag=True, help="Decode each text again without speculation and compare.")
@click.option("--profile", type=click.Path(dir_okay=False, path_type=Path), help="Write a trace for chrome://tracing.")
@json_option
def command(**settings: Any) -> int:
    """Generate text with a model and print what it took."""
    options = Options(**settings)
    check_options(options)
    if options.seed is None:
        options = dataclasses.replace(options, seed=secrets.randbits(31))

    start = time.perf_counter()
    from gptfast.cli.report import RunReport
    from gptfast.session import load

    import_s = time.perf_counter() - start
    session = load(
        options.checkpoint,
        preset=options.preset,
        device=options.device,
        dtype=options.dtype,
        weights=options.weights,
        activations=options.activations,
        kv_dtype=options.kv_dtype,
        kernels=options.kernels,
        cuda_graphs=options.cuda_graphs,
        step=options.step,
        pdl=options.pdl,
        compile=options.compile or options.compile_prefill,
        batch_size=options.batch_size,
        threads=options.threads,
        draft=options.draft,
        speculate_k=options.speculate_k,
    )
    sampling = options.change(session.defaults.sampling)
    with record_profile(options.profile):
        if options.interactive:
            from gptfast.cli.interactive import chat as produce
        else:
            produce = print_samples
        results, exit_code = produce(session, sampling, options)
    print_report(RunReport(session, results, import_s, sampling.seed), options.as_json)
    return exit_code


def check_options(options: Options) -> None:
    """Refuse what can be refused before a model is loaded."""
    if options.prompt is not None and options.prompt_file is not None:
        raise UserError("both --prompt and --prompt-file are given; give one of them")
    if options.interactive and (options.prompt is not None or options.prompt_file is not None):
        raise UserError("--interactive asks for its prompts; leave out --prompt and --prompt-file")
    if options.interactive and (options.num_samples != 1 or options.batch_size != 1 or options.as_json):
        raise UserError("--interactive is one conversation; leave out --num-samples, --batch-size and --json")
    if options.interactive and options.ignore_eos:
        raise UserError("a turn of --interactive ends with an end-of-sequence token; leave out --ignore-eos")
    if options.preset is not None and (options.chats or options.interactive or options.stop):
        raise UserError(
            f"random weights for {options.preset} have no tokenizer; "
            "leave out --chat, --system, --interactive and --stop"
        )
    if options.num_samples < 1:
        raise UserError(f"num-samples is {options.num_samples}; it must be at least 1")
    if options.max_new_tokens is not None and options.max_new_tokens < 0:
        raise UserError(f"max-new-tokens is {options.max_new_tokens}; it must be 0 or more")
    if options.check_exact and (options.draft is None or options.interactive):
        raise UserError("--check-exact compares speculation with plain decoding; give --draft, and no --interactive")
    if "" in options.stop:
        raise UserError("an empty --stop would end every text at once; leave it out")
    if sys.stdin is None and (options.interactive or "-" in (options.prompt, options.prompt_file)):
        raise UserError("standard input is closed; give the prompt with --prompt or --prompt-file")
    options.change(SamplingConfig())
    if options.profile is not None:
        options.profile.open("ab").close()  # a path that cannot be written is refused now


def print_samples(session: Session, sampling: SamplingConfig, options: Options) -> tuple[list[GenerationResult], int]:
    """Print every sample's text as it comes; the results, and the exit code that they deserve."""
    from gptfast.generation import Stream, encode_prompt

    prompt = encode_prompt(session, build_prompt(session, options))
    results: list[GenerationResult] = []
    exit_code = 0
    size = session.runner.batch_size
    for first in range(0, options.num_samples, size):
        start = functools.partial(
            Stream,
            session,
            prompt,
            max_new_tokens=options.max_new_tokens,
            sampling=sampling,
            stop=options.stop,
            sample_ids=range(first, first + size),
            ignore_eos=options.ignore_eos,
        )
        batch = start()
        is_interrupted = print_stream(batch)
        kept = batch.results()[: options.num_samples - first]
        for result in kept if session.tokenizer is None else kept[1:]:
            click.echo(result.text if session.tokenizer else " ".join(map(str, result.token_ids)))
        results += kept
        try:
            if options.check_exact and not is_interrupted and not print_check(session, batch, start(speculates=False)):
                exit_code = DIVERGED
        except KeyboardInterrupt:
            is_interrupted = True
        if is_interrupted:
            return results, INTERRUPTED
    return results, exit_code


def print_check(session: Session, speculated: Stream, plain: Stream) -> bool:
    """Say whether a finished stream has the text of a plain one that is still to run; True if it does."""
    from gptfast.exactness import find_divergence

    found = find_divergence(session, speculated, plain)
    if found is None:
        click.echo(f"exact: {speculated.result.new_tokens} tokens are those of plain decoding", err=True)
        return True
    ours, theirs = ("the end" if each is None else each for each in (found.speculated, found.plain))
    click.echo(
        f"not exact: token {found.index} is {ours}, and {theirs} in plain decoding, where the two largest logits are "
        f"{found.top_2_margin:.3g} apart",
        err=True,
    )
    return False


def print_stream(pieces: Stream) -> bool:
    """Print a text piece by piece and end its line; True if Ctrl-C ended it early."""
    is_interrupted = False
    try:
        for piece in pieces:
            click.echo(piece, nl=False)
    except KeyboardInterrupt:
        is_interrupted = True
    if pieces.result.text:
        click.echo()
    return is_interrupted


def build_prompt(session: Session, options: Options) -> Prompt:
    """What the command line asks to continue, or the default prompt: a question if the model can chat."""
    from gptfast.chat import Message
    from gptfast.generation import make_synthetic_prompt

    text = read_prompt_text(options)
    if text is None and session.tokenizer is None:
        return make_synthetic_prompt(session, SYNTHETIC_TOKENS)
    if not options.chats and options.prompt is not None and options.prompt.isdecimal():
        return make_synthetic_prompt(session, int(options.prompt))
    if not (options.chats or (text is None and session.chat_template is not None)):
        return DEFAULT_TEXT if text is None else text
    if session.chat_template is None:
        raise PromptError("this model has no chat template; leave out --chat and --system, and give text to complete")
    system = [] if options.system is None else [Message("system", options.system)]
    return [*system, Message("user", DEFAULT_QUESTION if text is None else text)]


def read_prompt_text(options: Options) -> str | None:
    """The prompt as text, from wherever the command line says; None if it says nothing."""
    if options.prompt == "-" or options.prompt_file == "-":
        return decode_utf8(sys.stdin.buffer.read(), "standard input")
    if options.prompt_file is not None:
        try:
            return decode_utf8(Path(options.prompt_file).read_bytes(), options.prompt_file)
        except OSError as error:
            raise PromptError(f"the prompt file {options.prompt_file} cannot be read: {error.strerror}") from error
    return options.prompt


def decode_utf8(data: bytes, source: str) -> str:
    """The bytes as text; raises PromptError naming where they came from."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(f"{source} is not UTF-8 text (byte {error.start}); convert it first") from error


@contextlib.contextmanager
def record_profile(path: Path | None) -> Iterator[None]:
    """Trace what runs within and write it to `path`, if one is given."""
    if path is None:
        yield
        return
    import torch.profiler

    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        yield
    profile.export_chrome_trace(str(path))
    click.echo(f"trace written to {path}", err=True)


def print_report(report: RunReport, as_json: bool) -> None:
    """The figures on standard error, and on request as the last line of standard output."""
    click.echo(report.to_text(), err=True)
    if as_json:
        click.echo(json.dumps(report.to_json()))
