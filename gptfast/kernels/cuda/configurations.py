"""How the kernels of `gptfast.kernels.cuda.linear` are cut into programs, by what is known of a GPU or by rule.

What was found fastest on a GPU stands in a file of its name in the cache, which `gptfast tune` writes. What that lacks
is taken from `configurations/<architecture>.json`, which holds the shapes of common models, one line each, with the
bound on instructions per weight that the compiled kernel must keep. Other shapes and GPUs get the rule's. The lines of
sm_90 are the rule's too: nothing has been timed on a GPU yet (December 2026); bounds are 4 % above what Triton 3.6 and
3.9 compile, whichever needs more.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch

from gptfast.cache import get_cache_dir, read_cached, replace_atomically
from gptfast.kernels.cuda.packing import ALIGNMENT, WEIGHTS_PER_WORD, Kind, get_power_of_two

logger = logging.getLogger(__name__)

DIRECTORY = Path(__file__).parent / "configurations"
MAX_ROWS = 16
"""Rows of inputs up to which a product reads the packed matrix itself."""
THREADS = 32
"""Of a warp."""
LOAD_WORDS = 4
"""That a thread loads at once: 16 bytes."""
THREAD_WORDS: dict[Kind, int] = {"bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "int4": 4}
"""Of a row that a thread holds at once; their weights are then added up by themselves, which costs the least."""
MAX_WARPS = 8
MAX_STAGES = 8
LEAST_TILE = 16
"""Rows of a matrix, and inputs, that a tensor core multiplies at least."""
MIN_PROGRAMS = 512
"""That a product is cut into if its blocks can be made small enough: some 4 for each multiprocessor of a large GPU."""


@dataclass(frozen=True)
class Configuration:
    """The size of a program.

    Attributes:
        block_rows: of the matrix that a program multiplies.
        block_words: of each of them that it holds at once: elements of bf16 and fp16 for several rows of inputs, else
            words. The whole row, or it loops.
        warps: of 32 threads.
        splits: of several rows of inputs, the parts of the matrix's rows that are worked on side by side.
        stages: loads in flight in the loop of several rows of inputs; of one row, 1.
    """

    block_rows: int
    block_words: int
    warps: int
    stages: int = 1
    splits: int = 1

    def describe(self) -> str:
        """Its numbers, for reports."""
        return "/".join(map(str, dataclasses.astuple(self)))


StepKind = Literal["compiled", "fused"]
"""What decodes a token: the step as torch.compile makes it, or that of our own kernels."""
Key = tuple[Kind, bool, int, int, int]
"""What a configuration is found by; see `TunedConfiguration`."""


class Gpu(NamedTuple):
    """What configurations depend on."""

    name: str
    capability: tuple[int, int]


@dataclass(frozen=True)
class TunedConfiguration:
    """A line of a GPU's file: the configuration of a product, and what its instructions per weight must not exceed.

    Attributes:
        several_rows: of inputs; else one.
        out_features, in_features, group_size: of the matrix; a group_size of 0 stands for one scale per row or none.
        max_instructions_per_weight: None for no bound.
    """

    kind: Kind
    several_rows: bool
    out_features: int
    in_features: int
    group_size: int
    configuration: Configuration
    max_instructions_per_weight: float | None = None

    @property
    def key(self) -> Key:
        """What it is found by."""
        return self.kind, self.several_rows, self.out_features, self.in_features, self.group_size


@dataclass(frozen=True)
class Tuning:
    """What was found out on a GPU, as its file holds it.

    Attributes:
        gpu: its name; None for every GPU of an architecture.
        triton, torch: the versions that the file was last written with; None where nothing was timed.
        date: of that, in ISO 8601.
        step: what `--step auto` is.
        products: their configurations, one line each.
    """

    gpu: str | None = None
    triton: str | None = None
    torch: str | None = None
    date: str | None = None
    step: StepKind = "compiled"
    products: tuple[TunedConfiguration, ...] = ()

    def replace_line(self, line: TunedConfiguration) -> Tuning:
        """The same with this line, in the place of the one that its product had."""
        lines = {each.key: each for each in self.products} | {line.key: line}
        return dataclasses.replace(self, products=tuple(lines.values()))

    def stamp(self) -> Tuning:
        """The same with the versions and the time of now."""
        import triton

        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return dataclasses.replace(self, triton=triton.__version__, torch=torch.__version__, date=date)


@functools.cache
def identify_gpu(device: torch.device) -> Gpu:
    """The GPU that a CUDA device is."""
    return Gpu(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))


@functools.cache
def choose_configuration(
    kind: Kind,
    rows: int,
    out_features: int,
    in_features: int,
    group_size: int = 0,
    gpu: Gpu | None = None,
    *,
    exact_rows: bool = False,
) -> Configuration:
    """The configuration for `rows` <= 16 rows of inputs and a matrix (out_features, in_features).

    A `group_size` of 0 stands for one scale per row or none, a `gpu` of None for one that nothing is known of. With
    `exact_rows`, one row is computed as several are.
    """
    several_rows = exact_rows or rows > 1
    key = (kind, several_rows, out_features, in_features, group_size)
    lines = {} if gpu is None else find_lines(gpu)
    if key in lines:
        return lines[key].configuration
    if several_rows:
        return plan_rows(kind, out_features, in_features, group_size)
    return plan_vector(kind, out_features, in_features)


def find_step(device: torch.device) -> StepKind:
    """What `--step auto` is on a CUDA device: `compiled`, until its file says that `fused` is right and faster."""
    return get_step(identify_gpu(device))


def get_step(gpu: Gpu) -> StepKind:
    """See `find_step`."""
    tunings = find_tunings(gpu)
    return tunings[0].step if tunings else "compiled"


def set_step(device: torch.device, step: StepKind, products: Iterable[TunedConfiguration] = ()) -> None:
    """Have `find_step` say so on a CUDA device, in this process and later ones.

    Configurations stay as they are, but for those of these products, with which the step was found to be so.
    """
    gpu = identify_gpu(device)
    path = get_tuning_path(gpu.name)
    known = open_tuning(path, gpu)
    lines = {line.key: line for line in (*known.products, *products)}
    write_tuning(path, dataclasses.replace(known, step=step, products=tuple(lines.values())).stamp())


def plan_vector(kind: Kind, out_features: int, in_features: int) -> Configuration:
    """Where nothing was tuned, for one row of inputs: whole rows at once if 8 warps can hold them, else even pieces.

    All warps lie along a row. Rows that no block divides are read in blocks of 2 warps, the last of them in part.
    """
    words = count_words(kind, in_features)
    block_words = min(get_power_of_two(words), MAX_WARPS * THREADS * THREAD_WORDS[kind])
    if block_words < THREADS * LOAD_WORDS:
        block_words = min(round_to_power_of_two(words), 2 * THREADS * THREAD_WORDS[kind])
        block_words = max(block_words, THREADS * LOAD_WORDS)
    warps = max(1, block_words // (THREADS * THREAD_WORDS[kind]))
    block_rows = 8 if kind == "int4" else 4
    while out_features < block_rows * MIN_PROGRAMS and block_rows > 2:
        block_rows //= 2
    return Configuration(block_rows, block_words, warps)


def plan_rows(kind: Kind, out_features: int, in_features: int, group_size: int) -> Configuration:
    """Where nothing was tuned, for up to 16 rows of inputs: the shortest blocks, as they lie in one group most often.

    A warp multiplies with its own instructions: those of a warpgroup, for 64 rows, need no fewer a weight on sm_90, and
    on sm_100 four times as many, to move sums and weights through tensor memory. Blocks of few rows keep more
    multiprocessors busy, but read the inputs more often; with scales inside a block, 32 rows need too many registers.
    """
    columns, block_words = count_columns(kind, in_features), 64 if kind in ("bf16", "fp16") else 16
    has_scales_inside = 0 < group_size < block_words * WEIGHTS_PER_WORD[kind]
    block_rows = 16 if out_features < 32 * MIN_PROGRAMS // 2 or has_scales_inside else 32
    splits = max(splits for splits in (1, 2, 4) if splits == 1 or columns % (splits * block_words) == 0)
    return Configuration(block_rows, block_words, warps=max(splits, block_rows // 16), stages=4, splits=splits)


def count_words(kind: Kind, in_features: int) -> int:
    """Words of a row, padding included."""
    return -(-in_features // ALIGNMENT) * ALIGNMENT // WEIGHTS_PER_WORD[kind]


def count_columns(kind: Kind, in_features: int) -> int:
    """What blocks of several rows of inputs count of a row: elements of bf16 and fp16, else words."""
    words = count_words(kind, in_features)
    return words * WEIGHTS_PER_WORD[kind] if kind in ("bf16", "fp16") else words


def round_to_power_of_two(number: int) -> int:
    """The smallest power of two that is not below it."""
    return 1 << (number - 1).bit_length()


def find_fault(kind: Kind, several_rows: bool, in_features: int, configuration: Configuration) -> str | None:
    """Why the kernels cannot be cut so for a matrix of so many inputs; None if they can."""
    block_rows, block_words, warps, stages, splits = dataclasses.astuple(configuration)
    sizes = {"block_rows": block_rows, "block_words": block_words, "warps": warps, "splits": splits}
    for name, size in sizes.items():
        if size < 1 or size != get_power_of_two(size):
            return f"{name} is {size}, not a power of two"
    if warps > MAX_WARPS:
        return f"warps are {warps}, of at most {MAX_WARPS}"
    if not several_rows:
        if (stages, splits) != (1, 1):
            return f"one row of inputs has 1 stage and 1 split, not {stages} and {splits}"
        if block_words % (THREADS * LOAD_WORDS * warps):
            return f"{warps} warps of {THREADS} threads do not load {block_words} words {LOAD_WORDS} at a time"
        return None
    if not 1 <= stages <= MAX_STAGES:
        return f"stages are {stages}, of at most {MAX_STAGES}"
    if min(block_rows, block_words) < LEAST_TILE:
        return f"a block of {block_rows} rows and {block_words} words is less than a tensor core multiplies"
    if splits > warps:
        return f"{warps} warps cannot work on {splits} parts"
    if splits > 1 and count_columns(kind, in_features) % (splits * block_words):
        return f"{splits} parts of a row of {count_columns(kind, in_features)} are no multiple of {block_words}"
    return None


def get_tuning_path(gpu_name: str) -> Path:
    """Where what is known of a GPU is kept."""
    slug = re.sub(r"[^a-z0-9]+", "-", gpu_name.lower()).strip("-")
    return get_cache_dir() / "cuda" / f"{slug}.json"


@functools.cache
def find_lines(gpu: Gpu) -> Mapping[Key, TunedConfiguration]:
    """What was tuned for a GPU, or for its architecture, by what it is for."""
    return {line.key: line for tuning in reversed(find_tunings(gpu)) for line in tuning.products}


@functools.cache
def find_tunings(gpu: Gpu) -> tuple[Tuning, ...]:
    """What holds for a GPU: its own file, and what is shipped for its architecture."""
    own, shipped = read_tuning(get_tuning_path(gpu.name), gpu.name), load_shipped(name_architecture(gpu))
    return tuple(tuning for tuning in (own, shipped) if tuning is not None)


def name_architecture(gpu: Gpu) -> str:
    """As shipped files are named: sm_90."""
    return f"sm_{gpu.capability[0]}{gpu.capability[1]}"


def load_shipped(architecture: str) -> Tuning | None:
    """What is shipped for an architecture, as sm_90; None if there is no file for it."""
    return read_tuning(DIRECTORY / f"{architecture}.json")


def open_tuning(path: Path, gpu: Gpu) -> Tuning:
    """What a file holds of a GPU, to add to; without one that can be used, nothing but what step the GPU takes."""
    found = read_tuning(path, gpu.name)
    return Tuning(gpu=gpu.name, step=get_step(gpu)) if found is None else found


@functools.cache
def read_tuning(path: Path, gpu_name: str | None = None) -> Tuning | None:
    """A GPU's file; None if there is none, or with a warning if it cannot be used.

    With a name, the file must be that GPU's. A process reads a file once, until it writes one.
    """
    text = read_cached(path)
    if text is None:
        return None
    try:
        tuning = parse_tuning(json.loads(text))
        if gpu_name is not None and tuning.gpu != gpu_name:
            raise ValueError(f"it is of {tuning.gpu}, and this GPU is {gpu_name}")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        logger.warning("%s is left aside (%s); delete it, or run `gptfast tune` again", path, describe_error(error))
        return None
    return tuning


def describe_error(error: Exception) -> str:
    """What is wrong with a file, in one line."""
    return f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else " ".join(str(error).split())


def parse_tuning(fields: Any) -> Tuning:
    """The object of a file; raises ValueError, TypeError or KeyError for another one."""
    if not isinstance(fields, dict):
        raise ValueError(f"it holds a {type(fields).__name__}, not an object")
    tuning = Tuning(**fields | {"products": tuple(map(parse_line, fields["products"]))})
    if tuning.step not in get_args(StepKind):
        raise ValueError(f"step is {tuning.step!r}, not {' or '.join(get_args(StepKind))}")
    return tuning


def parse_line(fields: Any) -> TunedConfiguration:
    """A line of a file; raises ValueError, TypeError or KeyError for what no kernel could be launched with."""
    configuration = Configuration(**fields["configuration"])
    line = TunedConfiguration(**fields | {"configuration": configuration})
    sizes = (line.out_features, line.in_features, line.group_size, *dataclasses.astuple(configuration))
    if not all(type(size) is int for size in sizes):
        raise TypeError(f"a size of {list(sizes)} is no whole number")
    if line.kind not in WEIGHTS_PER_WORD:
        raise ValueError(f"there are no weights of {line.kind!r}")
    fault = find_fault(line.kind, line.several_rows, line.in_features, configuration)
    if fault is not None:
        raise ValueError(f"{line.kind} {line.out_features} x {line.in_features}: {fault}")
    return line


def write_tuning(path: Path, tuning: Tuning) -> None:
    """Make a GPU's file, a line for each product, or have it take the place of what was there."""
    fields = dataclasses.asdict(tuning)
    lines = ",\n".join(json.dumps(line) for line in fields.pop("products"))
    head = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in fields.items())
    with replace_atomically(path) as partial:
        partial.write_text(f'{{\n{head},\n"products": [\n{lines}\n]\n}}\n')
    forget_files()


def forget_files() -> None:
    """Have files be read again."""
    for function in (read_tuning, find_tunings, find_lines, choose_configuration):
        function.cache_clear()
