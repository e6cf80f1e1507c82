"""Times of single products in the shapes of models, as configured, and the best of several configurations."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import Executor

import torch

from acceptance.device import find_bandwidth
from acceptance.findings import Findings
from acceptance.random_weights import BF16, FP8, INT4_G32, INT4_G128, INT8
from acceptance.timing import find_device
from gptfast.checkpoint.presets import get_preset
from gptfast.kernels.cuda.configurations import (
    Gpu,
    Tuning,
    find_lines,
    get_step,
    get_tuning_path,
    identify_gpu,
    open_tuning,
    write_tuning,
)
from gptfast.kernels.cuda.precompilation import compile_call, open_pool
from gptfast.kernels.cuda.products import Format, Product
from gptfast.kernels.cuda.timing import measure_work
from gptfast.kernels.cuda.tuning import (
    ROWS,
    WORKING_SET_BYTES,
    Time,
    Timer,
    TunedProduct,
    draw_inputs,
    list_layers,
    make_weights,
    time_weights,
    tune_products,
)

PRESETS = ("llama-3.1-8b", "llama-3.2-1b")
FORMATS = (INT4_G32, INT8, BF16, INT4_G128, FP8)
RESERVE_S = 15
"""Left when tuning ends, to write and to spare."""
TITLE = "Products: microseconds, GB/s and share of the read bandwidth"
TUNED_TITLE = "Tuning: rows, words, warps, stages and splits of a program"
CONFIGURATION_FILE = "gptfast/kernels/cuda/configurations.py, its rules for this GPU"


def run(findings: Findings) -> None:
    """Time the products of both models, then tune them while there is time."""
    from triton.runtime.errors import OutOfResources

    device = find_device()
    gpu = identify_gpu(device)
    bandwidth = find_bandwidth(findings, device)
    findings.note(read_gb_per_s=bandwidth)
    layers = [(preset, *layer) for preset in PRESETS for layer in list_layers(get_preset(preset)).items()]
    cases = itertools.product(FORMATS, layers, ROWS)
    products = list(dict.fromkeys(Product(form, *shape, rows) for form, (_, _, shape), rows in cases))
    pool = open_pool()
    try:
        errors = [future.result() for future in [pool.submit(compile_call, each, gpu) for each in products]]
        findings.note(compile_errors=[error for error in errors if error is not None])
        for form, (preset, name, shape) in itertools.product(FORMATS, layers):
            weights = make_weights(device, form, shape, WORKING_SET_BYTES)
            for rows in ROWS:
                try:
                    found = time_weights(weights, draw_inputs(device, rows, shape[1]))
                except OutOfResources as error:
                    case = Product(form, *shape, rows)
                    findings.check(f"{case}: it can be launched", False, str(error), CONFIGURATION_FILE)
                    continue
                row = describe_time(form, shape, rows, found, bandwidth)
                findings.add_row(TITLE, {"model": preset, "layer": name} | row)
        tune_all(findings, device, gpu, products, pool)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def describe_time(form: Format, shape: tuple[int, int], rows: int, found: Time, bandwidth: float) -> dict[str, str]:
    """A row of the table."""
    return {
        "shape": f"{shape[0]} x {shape[1]}",
        "weights": form.name,
        "rows": str(rows),
        "us": f"{1e6 * found.seconds:.2f}",
        "GB/s": f"{found.gb_per_s:.0f}",
        "share": f"{found.gb_per_s / bandwidth:.1%}",
    }


def tune_all(
    findings: Findings,
    device: torch.device,
    gpu: Gpu,
    products: Sequence[Product],
    pool: Executor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    timer: Timer = measure_work,
) -> None:
    """Tune products while there is time; the file of the GPU then holds them and all that was known before."""
    known = Tuning(gpu=gpu.name, step=get_step(gpu), products=tuple(find_lines(gpu).values()))
    n_tuned = 0
    for found in tune_products(
        products,
        device,
        gpu,
        pool,
        findings.out / "configurations.json",
        known,
        get_remaining_s=lambda: findings.get_remaining_s() - RESERVE_S,
        dtype=dtype,
        timer=timer,
    ):
        add_tuned(findings, found)
        n_tuned += 1
    if n_tuned > 0:
        # For the sections that follow, whose cache is this run's own.
        write_tuning(get_tuning_path(gpu.name), open_tuning(findings.out / "configurations.json", gpu))
    if n_tuned < len(products):
        findings.note(untuned=len(products) - n_tuned)


def add_tuned(findings: Findings, found: TunedProduct) -> None:
    """A row of what was tuned, and a check that fails for every configuration whose result was wrong."""
    product = found.product
    for configuration, difference in found.differences.items():
        findings.check(
            f"{product}: the result is right at {configuration.describe()}",
            False,
            f"relative difference {difference:.2g}",
            "gptfast/kernels/cuda/linear.py at this configuration",
        )
    if found.in_use in found.times:
        findings.add_row(
            TUNED_TITLE,
            {
                "weights": product.form.name,
                "shape": f"{product.out_features} x {product.in_features}",
                "rows": str(product.rows),
                "in use": found.in_use.describe(),
                "us": f"{1e6 * found.times[found.in_use].seconds:.2f}",
                "best": found.best.describe(),
                "us of it": f"{1e6 * found.times[found.best].seconds:.2f}",
                "tried": str(len(found.times)),
            },
        )
