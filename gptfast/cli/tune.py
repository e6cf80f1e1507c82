"""`gptfast tune`: the kernels of a model's products cut as is fastest on this GPU."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gptfast.cli.bench_startup import ends_as_by_ctrl_c
from gptfast.cli.generate import INTERRUPTED
from gptfast.cli.options import checkpoint_option, json_option, random_option, weights_option
from gptfast.cli.tables import format_table
from gptfast.errors import UserError

if TYPE_CHECKING:
    import torch

    from gptfast.kernels.cuda.configurations import Configuration, Gpu
    from gptfast.kernels.cuda.products import Product
    from gptfast.kernels.cuda.tuning import Time, TunedProduct
    from gptfast.loading import Weights


@click.command(name="tune")
@checkpoint_option
@random_option
@weights_option
@click.option(
    "--budget-s",
    type=click.FloatRange(min=1),
    default=300,
    show_default=True,
    help="Seconds after which no further product is begun.",
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File of configurations to write, or to add to [default: this GPU's in the cache, which every run reads].",
)
@json_option
def command(
    checkpoint: str | None, preset: str | None, weights: Weights, budget_s: float, output: Path | None, as_json: bool
) -> int:
    """Find out how the kernels of a model's products are cut best on this GPU, and have later runs do so.

    Every product is timed at several configurations, over 200 MB of random weights, for one row of inputs and for
    several. What was found is kept product by product, also when Ctrl-C or the budget ends it early.
    """
    end_s = time.monotonic() + budget_s
    from gptfast.kernels.cuda.configurations import get_tuning_path, identify_gpu
    from gptfast.kernels.cuda.tuning import choose_gpu
    from gptfast.loading import WEIGHTS
    from gptfast.session import check_choice

    check_choice("weights", weights, WEIGHTS)
    device = choose_gpu()
    gpu = identify_gpu(device)
    path = get_tuning_path(gpu.name) if output is None else output
    check_writable(path)
    with ends_as_by_ctrl_c():
        products = find_products(checkpoint, preset, weights, device)
        found, is_interrupted = run_tuning(products, device, gpu, path, end_s)
    if found:
        click.echo(format_result(found, gpu, path))
    n_left = len(products) - len(found)
    if n_left:
        reason = "interrupted" if is_interrupted else f"{budget_s:.0f} s are over; give more with --budget-s"
        click.echo(f"{n_left} of {len(products)} products were not tuned: {reason}", err=True)
    if as_json:
        click.echo(json.dumps(describe_run(gpu, path) | {"untuned": n_left, "products": list(map(to_json, found))}))
    return INTERRUPTED if is_interrupted else 0


def check_writable(path: Path) -> None:
    """Raise UserError where the file could not be made, before time is spent on what belongs in it."""
    from gptfast.cache import is_writable

    if not is_writable(path.parent):
        raise UserError(f"{path.parent} cannot be written to; name another file with --output")


def find_products(checkpoint: str | None, preset: str | None, weights: Weights, device: torch.device) -> list[Product]:
    """The products of a model, those with one matrix after each other."""
    from gptfast.kernels.cuda.products import Product
    from gptfast.kernels.cuda.timing import free_memory
    from gptfast.kernels.cuda.tuning import ROWS
    from gptfast.outline import list_products
    from gptfast.session import choose_dtype, open_source

    source = open_source(checkpoint, preset)
    click.echo(f"reading what {source.path} is made of", err=True)
    matrices = list_products(source, device=device, dtype=choose_dtype(None, device), weights=weights)
    if not matrices:
        raise UserError(f"no matrix of {source.path} is one that the CUDA kernels multiply; try --weights int4")
    free_memory(device)
    return [Product(form, *shape, rows) for (form, shape), rows in itertools.product(matrices, ROWS)]


def run_tuning(
    products: Sequence[Product], device: torch.device, gpu: Gpu, path: Path, end_s: float
) -> tuple[list[TunedProduct], bool]:
    """What was found until a time of the monotonic clock, or until Ctrl-C, and whether it was that."""
    from gptfast.kernels.cuda.configurations import open_tuning
    from gptfast.kernels.cuda.precompilation import open_pool
    from gptfast.kernels.cuda.tuning import tune_products

    results: list[TunedProduct] = []
    pool = open_pool()
    click.echo(f"compiling the kernels of {len(products)} products, and timing them as they are ready", err=True)
    try:
        for found in tune_products(
            products,
            device,
            gpu,
            pool,
            path,
            open_tuning(path, gpu),
            get_remaining_s=lambda: end_s - time.monotonic(),
        ):
            results.append(found)
            click.echo(f"{len(results)} of {len(products)}: {describe_found(found)}", err=True)
    except KeyboardInterrupt:
        return results, True
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return results, False


def describe_found(found: TunedProduct) -> str:
    """A product and what became of it."""
    if not found.times:
        return f"{found.product}: no configuration can be launched here"
    best = f"{1e6 * found.times[found.best].seconds:.2f} us at {found.best.describe()}"
    before = found.times.get(found.in_use)
    if found.best == found.in_use or before is None:
        return f"{found.product}: {best}"
    return f"{found.product}: {best}, {1e6 * before.seconds:.2f} us before"


def format_result(results: Sequence[TunedProduct], gpu: Gpu, path: Path) -> str:
    """The GPU, a row per product, the results that were wrong, and where it is kept."""
    rows: list[Sequence[str]] = [("weights", "matrix", "rows", "in use", "us", "best", "us", "GB/s", "time", "tried")]
    rows += map(format_row, results)
    wrong = [
        f"note: {found.product}: the result at {configuration.describe()} is wrong by {difference:.2g}"
        for found in results
        for configuration, difference in found.differences.items()
    ]
    foot = "configurations are rows/words/warps/stages/splits of a program; time is that of the best to the one in use"
    table = format_table(rows, left_columns=(0, 1, 3, 5))
    kept = [f"kept in {path}"] if any(found.times for found in results) else []
    return "\n".join([gpu.name, "", table, foot, *wrong, *kept])


def format_row(found: TunedProduct) -> tuple[str, ...]:
    """One product."""
    product = found.product
    before, after = found.times.get(found.in_use), found.times.get(found.best)
    return (
        product.form.name,
        f"{product.out_features} x {product.in_features}",
        str(product.rows),
        found.in_use.describe(),
        format_us(before),
        "-" if after is None else found.best.describe(),
        format_us(after),
        "-" if after is None else f"{after.gb_per_s:,.0f}",
        "-" if before is None or after is None else f"{after.seconds / before.seconds:.2f}",
        str(len(found.times)),
    )


def format_us(found: Time | None) -> str:
    """Microseconds, if there are any."""
    return "-" if found is None else f"{1e6 * found.seconds:.2f}"


def describe_run(gpu: Gpu, path: Path) -> dict[str, Any]:
    """On what it was found, and where it is kept."""
    from gptfast.kernels.cuda.configurations import Tuning, name_architecture

    fields = dataclasses.asdict(Tuning().stamp())
    versions = {name: fields[name] for name in ("date", "torch", "triton")}
    return versions | {"device_name": gpu.name, "architecture": name_architecture(gpu), "path": str(path)}


def to_json(found: TunedProduct) -> dict[str, Any]:
    """One product; times are null of a configuration that could not be launched."""
    product = found.product
    return {
        "weights": product.form.name,
        "out_features": product.out_features,
        "in_features": product.in_features,
        "rows": product.rows,
        "in_use": to_json_timed(found.in_use, found),
        "best": to_json_timed(found.best, found),
        "tried": len(found.times),
        "wrong": [configuration.describe() for configuration in found.differences],
    }


def to_json_timed(configuration: Configuration, found: TunedProduct) -> dict[str, Any]:
    """A configuration, its microseconds and GB/s."""
    measured = found.times.get(configuration)
    return dataclasses.asdict(configuration) | {
        "us": None if measured is None else 1e6 * measured.seconds,
        "gb_per_s": None if measured is None else measured.gb_per_s,
    }
