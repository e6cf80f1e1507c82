"""From the start of a process to its first token: whole processes of `gptfast generate`, timed from outside.

Each generates one token and tells how long its own parts took. What they leave of the time up to the first byte of
output is the interpreter's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

from gptfast.bench.environment import Environment, describe_environment
from gptfast.bench.phases import Clock
from gptfast.bench.statistics import Spread, summarize_runs
from gptfast.cache import CACHE_VARIABLE, get_cache_dir, is_writable
from gptfast.download import OnMessage, get_default_model
from gptfast.errors import UserError

KERNEL_CACHE_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
NOTES = (
    "cold is a start in an empty cache: it compiles the CPU kernels, which is in its load, and the steps, and parses "
    "the model's metadata, where it is asked for these; the files of the model and of torch may be in the page cache",
    "warm is a start in the user's cache after one that is not counted",
    "the parts of one start add up to its first token; medians of the parts need not",
)
UNCACHED_NOTE = "not every warm start found its compiled steps in the cache: some compiled them, or ran eagerly"
DTYPE_NOTE = "a cold start, which chooses the dtype anew, chose another one than the warm starts; --dtype settles it"

Figure = TypeVar("Figure")


class StartError(UserError):
    """A process that ended without its token."""


@dataclass(frozen=True)
class StartupSettings:
    """What to start and how often.

    Attributes:
        checkpoint, device, dtype, weights, activations, kv_dtype, kernels, cuda_graphs, step, pdl, threads: as of
            `gptfast generate`.
        preset: instead of a checkpoint, random weights in these shapes.
        compile: whether compiled steps are asked for.
        prompt_tokens: length of the synthetic prompt.
        cold_starts: each in an empty cache of its own; may be 0.
        warm_starts: in the user's cache, after one that is not counted.
    """

    checkpoint: str | None
    preset: str | None
    device: str
    dtype: str | None
    weights: str
    activations: str | None
    kv_dtype: str | None
    kernels: str
    cuda_graphs: str | None
    step: str
    pdl: bool
    threads: int | None
    compile: bool
    prompt_tokens: int
    cold_starts: int
    warm_starts: int


@dataclass(frozen=True)
class Start(Generic[Figure]):
    """The parts of a start in seconds: of one process, or as spreads over several.

    Attributes:
        interpreter_s: from before the process to its own clock: Python, the command line, and what no other part has.
        import_s: torch and the runtime.
        load_s: from the checkpoint on disk to the model in memory, on a CPU the kernels that pack it included.
        compile_s: making the compiled steps, or loading them.
        first_step_s: reading the prompt and choosing the first token.
        first_token_s: from before the process to its first byte of output, the sum of the parts above.
        teardown_s: from there to the end of the process.
    """

    interpreter_s: Figure
    import_s: Figure
    load_s: Figure
    compile_s: Figure
    first_step_s: Figure
    first_token_s: Figure
    teardown_s: Figure


@dataclass(frozen=True)
class StartupResult:
    """All of one benchmark.

    Attributes:
        date: when it ended, ISO 8601 in UTC.
        model: the checkpoint's file or directory, or the preset.
        dtype, weights, activations, kv_dtype, kernels: that the warm starts ran in.
        cold: None if no cold start was asked for.
        notes: sentences that a reader of the figures must know.
    """

    date: str
    environment: Environment
    model: str
    dtype: str
    weights: str
    activations: str
    kv_dtype: str
    kernels: str
    settings: StartupSettings
    cold: Start[Spread] | None
    warm: Start[Spread]
    notes: tuple[str, ...]


def measure_startup(settings: StartupSettings, on_message: OnMessage) -> StartupResult:
    """Start the processes one after another; `on_message` gets a line before each.

    Raises UserError if the cache cannot be written, so that no start would be warm, and StartError with the last
    line of a process that fails.
    """
    if not is_writable(get_cache_dir()):
        raise UserError(
            f"the cache {get_cache_dir()} cannot be written, so no start would be warm; "
            f"set {CACHE_VARIABLE} to another directory"
        )
    if settings.checkpoint is None and settings.preset is None:
        settings = dataclasses.replace(settings, checkpoint=str(get_default_model(on_message)))
    command = build_command(settings)
    on_message("a first start, which is not counted")
    first = time_start(command, os.environ)
    cold = [time_cold_start(command) for _ in announce_each("cold", settings.cold_starts, on_message)]
    warm = [time_start(command, os.environ) for _ in announce_each("warm", settings.warm_starts, on_message)]
    report = first[1]
    import torch

    return StartupResult(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        environment=describe_environment(torch.device(report["device"]), report["threads"]),
        model=settings.preset or get_file_name(str(settings.checkpoint)),
        dtype=report["dtype"],
        weights=report["weights"],
        activations=report["activations"],
        kv_dtype=report["kv_dtype"],
        kernels=report["kernels"],
        settings=settings,
        cold=summarize_starts([start for start, _ in cold]) if cold else None,
        warm=summarize_starts([start for start, _ in warm]),
        notes=write_notes(settings, [report for _, report in cold], [report for _, report in warm]),
    )


def write_notes(
    settings: StartupSettings, cold: Sequence[Mapping[str, Any]], warm: Sequence[Mapping[str, Any]]
) -> tuple[str, ...]:
    """What a reader of the figures must know, by the reports of the processes."""
    notes = list(NOTES)
    if settings.compile and any(report["compile_kind"] != "cached" for report in warm):
        notes.append(UNCACHED_NOTE)
    if len({report["dtype"] for report in (*cold, *warm)}) > 1:
        notes.append(DTYPE_NOTE)
    return tuple(notes)


def announce_each(kind: str, count: int, on_message: OnMessage) -> Iterator[int]:
    """The numbers from 1 to `count`, each after a line that says which start comes now."""
    for number in range(1, count + 1):
        on_message(f"{kind} start {number} of {count}")
        yield number


def build_command(settings: StartupSettings) -> list[str]:
    """A process that prints one token and a line of JSON."""
    command = [sys.executable, "-m", "gptfast", "generate", "--prompt", str(settings.prompt_tokens)]
    command += ["--max-new-tokens", "1", "--ignore-eos", "--seed", "0", "--json"]
    command += ["--compile"] if settings.compile else []
    command += [] if settings.pdl else ["--no-pdl"]
    options = {
        "--checkpoint": settings.checkpoint,
        "--random": settings.preset,
        "--device": settings.device,
        "--dtype": settings.dtype,
        "--weights": settings.weights,
        "--activations": settings.activations,
        "--kv-dtype": settings.kv_dtype,
        "--kernels": settings.kernels,
        "--cuda-graphs": settings.cuda_graphs,
        "--step": settings.step,
        "--threads": settings.threads,
    }
    for name, value in options.items():
        if value is not None:
            command += [name, str(value)]
    return command


def time_cold_start(command: Sequence[str]) -> tuple[Start[float], dict[str, Any]]:
    """`time_start` where nothing is found that an earlier start has left in our cache or the compiler's."""
    environment = {name: value for name, value in os.environ.items() if name not in KERNEL_CACHE_VARIABLES}
    with tempfile.TemporaryDirectory(prefix="gptfast-cold-") as cache:
        return time_start(command, environment | {CACHE_VARIABLE: cache})


def time_start(
    command: Sequence[str], environment: Mapping[str, str], clock: Clock = time.perf_counter
) -> tuple[Start[float], dict[str, Any]]:
    """Run the command to its end; its parts, and the JSON object in its last line of output.

    Raises StartError with its last line of error if it fails. However this ends, the process and those that it
    started are gone.
    """
    with tempfile.TemporaryFile() as errors:
        began_s = clock()
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            bufsize=0,
            start_new_session=True,
        ) as process:
            assert process.stdout is not None
            try:
                output = process.stdout.read(1)
                first_output_s = clock()
                # Not until the end of its output, which the compiler's workers hold open for longer.
                process.wait()
                ended_s = clock()
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            output += process.stdout.read()
        if process.returncode != 0:
            errors.seek(0)
            raise StartError(explain_failure(process.returncode, errors.read().decode(errors="replace")))
    report: dict[str, Any] = json.loads(output.splitlines()[-1])
    return split_start(report, first_output_s - began_s, ended_s - first_output_s), report


def split_start(report: Mapping[str, Any], first_token_s: float, teardown_s: float) -> Start[float]:
    """The parts of a process that reports its own; what they leave of its first token's time is the interpreter's."""
    parts = {
        "import_s": report["import_s"],
        "load_s": report["load_s"],
        "compile_s": report["compile_s"],
        "first_step_s": report["ttft_s"],
    }
    return Start(
        interpreter_s=first_token_s - sum(parts.values()),
        **parts,
        first_token_s=first_token_s,
        teardown_s=teardown_s,
    )


def summarize_starts(starts: Sequence[Start[float]]) -> Start[Spread]:
    """Each part over all of the starts."""
    names = [field.name for field in dataclasses.fields(Start)]
    return Start(**{name: summarize_runs([getattr(start, name) for start in starts]) for name in names})


def explain_failure(returncode: int, error_text: str) -> str:
    """One line about a process that failed: its own last one, if it had the time to write it."""
    if returncode < 0:
        name = signal.Signals(-returncode).name
        return f"the started process was ended by {name}; look whether there is enough memory for the model"
    lines = [line for line in error_text.splitlines() if line.strip()]
    return lines[-1].removeprefix("error: ") if lines else f"the started process ended with code {returncode}"


def get_file_name(checkpoint: str) -> str:
    """The name of a checkpoint's file or directory, also where it is given as `.`."""
    return os.path.basename(os.path.abspath(os.path.expanduser(checkpoint)))
