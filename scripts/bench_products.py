"""Measure the products of the CPU kernels by themselves, beside how fast the machine reads memory in the same run.

    python scripts/bench_products.py --threads 2

Each kind of weights is a set of matrices that no cache holds, and a pass multiplies by every one of them once. A
decode step is such a pass of 1 row. What reads drafts or a short prompt has a few rows, and should take hardly longer,
as the matrices are read once for all of them. Passes of different numbers
of rows take turns, so that a machine whose speed drifts slows all of them alike.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import click

from gptfast.cli.main import execute
from gptfast.cli.tables import format_table
from gptfast.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from gptfast.bench.results import Bandwidth

ROWS_OF_INPUTS = (1, 5, 16)
BLOCK = 32
"""Inputs that the kernels take at once, and that share a scale of int4."""
Passes = tuple[int, int, list[float]]
"""A pass's matrices, their bytes, and the seconds of every pass."""


@dataclass(frozen=True)
class Kind:
    """Weights of one precision: `make` packs a matrix of N rows and K columns of them."""

    name: str
    make: Callable[[int, int], Tensor]
    rounds_inputs: bool


@dataclass(frozen=True)
class Measurement:
    """How long a pass takes.

    Attributes:
        weights: `int4 g32`, `int8 channel` or `bfloat16`.
        activations: `fp32`, or `int8` where inputs are rounded.
        rows: of the inputs.
        matrices: of a pass.
        read_bytes: the packed bytes of a pass's matrices.
        p50_ms: the median time of a pass.
        gb_per_s: these bytes over that time.
        share: of the ceiling of memory bandwidth.
        ratio: the time over that of 1 row.
    """

    weights: str
    activations: str
    rows: int
    matrices: int
    read_bytes: int
    p50_ms: float
    gb_per_s: float
    share: float
    ratio: float


def list_kinds() -> list[Kind]:
    """Every precision with each way to hold activations that it has."""
    return [
        Kind("int4 g32", make_int4, rounds_inputs=False),
        Kind("int4 g32", make_int4, rounds_inputs=True),
        Kind("int8 channel", make_int8, rounds_inputs=False),
        Kind("int8 channel", make_int8, rounds_inputs=True),
        Kind("bfloat16", make_bfloat16, rounds_inputs=False),
    ]


def make_int4(rows: int, columns: int) -> Tensor:
    """A packed matrix of random symmetric codes of 4 bits, a scale for each group of 32."""
    return make_quantized(rows, columns, bits=4, groups=columns // BLOCK)


def make_int8(rows: int, columns: int) -> Tensor:
    """A packed matrix of random symmetric codes of 8 bits, a scale for each row."""
    return make_quantized(rows, columns, bits=8, groups=1)


def make_quantized(rows: int, columns: int, *, bits: int, groups: int) -> Tensor:
    """A packed matrix of random codes; its scales keep outputs near size 1."""
    import torch

    from gptfast.kernels.packing import pack
    from gptfast.quantization import QuantizedWeight

    limit = 2 ** (bits - 1)
    codes = torch.empty(rows, columns, dtype=torch.int8).random_(-limit, limit)
    scales = torch.full((rows, groups), columns**-0.5 / limit).half().float()
    return pack(QuantizedWeight(codes, scales, bits))


def make_bfloat16(rows: int, columns: int) -> Tensor:
    """A packed matrix of random numbers in bfloat16."""
    import torch

    from gptfast.kernels.packing import pack

    return pack(torch.empty(rows, columns, dtype=torch.bfloat16).normal_(0.0, columns**-0.5))


def make_matrices(kind: Kind, shape: tuple[int, int], least_bytes: int) -> list[Tensor]:
    """Matrices of that shape, together of at least so many packed bytes."""
    matrices = [kind.make(*shape)]
    while len(matrices) * matrices[0].nbytes < least_bytes:
        matrices.append(kind.make(*shape))
    return matrices


def time_pass(kind: Kind, matrices: Sequence[Tensor], x: Tensor, out_features: int) -> float:
    """Seconds of the products of x (M, K) with all matrices."""
    from gptfast.kernels import ops

    start = time.perf_counter()
    for matrix in matrices:
        ops.linear(x, matrix, out_features=out_features, rounds_inputs=kind.rounds_inputs)
    return time.perf_counter() - start


def measure_kind(
    kind: Kind, shape: tuple[int, int], least_bytes: int, repeats: int
) -> list[tuple[int, int, list[float]]]:
    """What so many passes took for each of `ROWS_OF_INPUTS`; one more of each comes first and is not counted."""
    import torch

    matrices = make_matrices(kind, shape, least_bytes)
    inputs = [torch.randn(rows, shape[1]) for rows in ROWS_OF_INPUTS]
    turns = [[time_pass(kind, matrices, x, shape[0]) for x in inputs] for _ in range(1 + repeats)]
    read_bytes = sum(matrix.nbytes for matrix in matrices)
    return [(len(matrices), read_bytes, list(seconds)) for seconds in zip(*turns[1:], strict=True)]


def measure(shape: tuple[int, int], least_bytes: int, repeats: int) -> tuple[Bandwidth, list[Measurement]]:
    """The bandwidth, probed before and after, and what every kind of weights makes of it."""
    import torch

    from gptfast.bench.bandwidth import compare_probes, probe_bandwidth

    device = torch.device("cpu")
    before = probe_bandwidth(device, time.perf_counter)
    times = [(kind, measure_kind(kind, shape, least_bytes, repeats)) for kind in list_kinds()]
    bandwidth = compare_probes(before, probe_bandwidth(device, time.perf_counter))
    return bandwidth, [row for kind, passes in times for row in summarize(kind, passes, bandwidth.ceiling_gb_per_s)]


def summarize(kind: Kind, passes: Sequence[Passes], ceiling_gb_per_s: float) -> list[Measurement]:
    """The figures of one kind, in the order of `ROWS_OF_INPUTS`."""
    from gptfast.bench.statistics import summarize_latencies

    medians = [summarize_latencies(seconds).p50_ms for _, _, seconds in passes]
    measurements = []
    for rows, p50_ms, (matrices, read_bytes, _) in zip(ROWS_OF_INPUTS, medians, passes, strict=True):
        gb_per_s = read_bytes / p50_ms / 1e6
        measurements.append(
            Measurement(
                weights=kind.name,
                activations="int8" if kind.rounds_inputs else "fp32",
                rows=rows,
                matrices=matrices,
                read_bytes=read_bytes,
                p50_ms=p50_ms,
                gb_per_s=gb_per_s,
                share=gb_per_s / ceiling_gb_per_s,
                ratio=p50_ms / medians[0],
            )
        )
    return measurements


def format_measurements(bandwidth: Bandwidth, measurements: Sequence[Measurement]) -> str:
    """A row for each kind and number of rows, and the ceiling."""
    header = ("weights", "activations", "rows", "MB", "p50 ms", "GB/s", "share", "over 1 row")
    rows = [
        (
            each.weights,
            each.activations,
            str(each.rows),
            f"{each.read_bytes / 1e6:,.1f}",
            f"{each.p50_ms:.2f}",
            f"{each.gb_per_s:.1f}",
            f"{each.share:.0%}",
            f"{each.ratio:.2f}",
        )
        for each in measurements
    ]
    table = format_table([header, *rows], left_columns=(0, 1))
    return f"{table}\n\nmemory is read at {bandwidth.ceiling_gb_per_s:.1f} GB/s, drift {bandwidth.drift:.1%}"


@click.command()
@click.option("--threads", type=click.IntRange(1), help="CPU threads [default: torch's choice].")
@click.option("--repeats", type=click.IntRange(1), default=15, show_default=True, help="Passes of each kind.")
@click.option("--rows", type=click.IntRange(1), default=14336, show_default=True, help="out_features of a matrix.")
@click.option("--columns", type=click.IntRange(1), default=4096, show_default=True, help="in_features; 32 divides it.")
@click.option("--megabytes", type=click.IntRange(0), default=256, show_default=True, help="Least size of a pass.")
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON after the table.")
def main(threads: int | None, repeats: int, rows: int, columns: int, megabytes: int, as_json: bool) -> None:
    """Time products with matrices that no cache holds, of 1, 5 and 16 rows of inputs."""
    import torch

    from gptfast.bench.environment import describe_environment
    from gptfast.kernels.ops import has_cpu_kernels

    if columns % BLOCK:
        raise UserError(f"--columns is {columns}, which groups of {BLOCK} do not divide; give a multiple of it")
    if not has_cpu_kernels():
        raise UserError("without the CPU kernels there is nothing to measure; install a C++ compiler")
    if threads is not None:
        torch.set_num_threads(threads)
    torch.manual_seed(0)
    bandwidth, measurements = measure((rows, columns), megabytes * 10**6, repeats)
    environment = describe_environment(torch.device("cpu"), torch.get_num_threads())
    click.echo(f"{environment.device_name}, {environment.threads} threads, matrices of {rows} x {columns}\n")
    click.echo(format_measurements(bandwidth, measurements))
    if as_json:
        facts = {
            "environment": asdict(environment),
            "shape": [rows, columns],
            "repeats": repeats,
            "bandwidth": asdict(bandwidth),
            "products": [asdict(each) for each in measurements],
        }
        click.echo(json.dumps(facts))


if __name__ == "__main__":
    execute(main, "bench_products.py")
