"""How the kernels of `gptfast.kernels.cuda.linear` are cut into programs, by what is known of a GPU or by rule.

`configurations/<architecture>.json` holds what was chosen for the shapes of common models, one line each, with the
bound on instructions per weight that the compiled kernel must keep. Other shapes and GPUs get the rule's. The lines of
sm_90 are the rule's too: nothing has been timed on a GPU yet (December 2026); bounds are 4 % above what Triton 3.6 and
3.9 compile, whichever needs more.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptfast.kernels.cuda.packing import ALIGNMENT, WEIGHTS_PER_WORD, Kind, get_power_of_two

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


@dataclass(frozen=True)
class TunedConfiguration:
    """A line of a GPU's file: the configuration of a product, and what its instructions per weight must not exceed.

    Attributes:
        several_rows: of inputs; else one.
        out_features, in_features, group_size: of the matrix; a group_size of 0 stands for one scale per row or none.
    """

    kind: Kind
    several_rows: bool
    out_features: int
    in_features: int
    group_size: int
    configuration: Configuration
    max_instructions_per_weight: float


@functools.cache
def choose_configuration(
    kind: Kind,
    rows: int,
    out_features: int,
    in_features: int,
    group_size: int = 0,
    capability: tuple[int, int] | None = None,
    *,
    exact_rows: bool = False,
) -> Configuration:
    """The configuration for `rows` <= 16 rows of inputs and a matrix (out_features, in_features).

    A `group_size` of 0 stands for one scale per row or none, a `capability` of None for a GPU that nothing is known of.
    With `exact_rows`, one row is computed as several are.
    """
    several_rows = exact_rows or rows > 1
    key = (kind, several_rows, out_features, in_features, group_size)
    tuned = {} if capability is None else load_configurations(f"sm_{capability[0]}{capability[1]}")
    if key in tuned:
        return tuned[key].configuration
    if several_rows:
        return plan_rows(kind, out_features, in_features, group_size)
    return plan_vector(kind, out_features, in_features)


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
    words, block_words = count_words(kind, in_features), 16
    if kind in ("bf16", "fp16"):
        words, block_words = words * WEIGHTS_PER_WORD[kind], 64
    has_scales_inside = 0 < group_size < block_words * WEIGHTS_PER_WORD[kind]
    block_rows = 16 if out_features < 32 * MIN_PROGRAMS // 2 or has_scales_inside else 32
    splits = max(splits for splits in (1, 2, 4) if splits == 1 or words % (splits * block_words) == 0)
    return Configuration(block_rows, block_words, warps=max(splits, block_rows // 16), stages=4, splits=splits)


def count_words(kind: Kind, in_features: int) -> int:
    """Words of a row, padding included."""
    return -(-in_features // ALIGNMENT) * ALIGNMENT // WEIGHTS_PER_WORD[kind]


def round_to_power_of_two(number: int) -> int:
    """The smallest power of two that is not below it."""
    return 1 << (number - 1).bit_length()


@functools.cache
def load_configurations(architecture: str) -> dict[tuple[Kind, bool, int, int, int], TunedConfiguration]:
    """The lines of a GPU's file by what they are for; none if there is no file for `architecture`, as sm_90."""
    path = DIRECTORY / f"{architecture}.json"
    if not path.exists():
        return {}
    lines = [read_configuration(line) for line in json.loads(path.read_text())]
    return {
        (line.kind, line.several_rows, line.out_features, line.in_features, line.group_size): line for line in lines
    }


def read_configuration(line: dict[str, Any]) -> TunedConfiguration:
    """A line of a file."""
    return TunedConfiguration(**line | {"configuration": Configuration(**line["configuration"])})


def write_configurations(path: Path, lines: Iterable[TunedConfiguration]) -> None:
    """Make a GPU's file, one line each."""
    path.write_text("[\n" + ",\n".join(json.dumps(dataclasses.asdict(line)) for line in lines) + "\n]\n")
