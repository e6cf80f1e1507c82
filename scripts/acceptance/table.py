"""Times of single products in the shapes of models, as configured, and the best of several configurations."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from acceptance.device import find_bandwidth
from acceptance.findings import Findings
from acceptance.precompile import Product, compile_call, configured, open_pool, prepare_product
from acceptance.random_weights import (
    BF16,
    FP8,
    INT4_G32,
    INT4_G128,
    INT8,
    Format,
    count_bytes,
    describe_packed,
    draw_packed,
)
from acceptance.timing import find_device, free_memory, measure_work
from gptfast.cache import replace_atomically
from gptfast.checkpoint.presets import get_preset
from gptfast.config import ModelConfig
from gptfast.kernels.cuda.configurations import (
    LOAD_WORDS,
    MAX_WARPS,
    THREAD_WORDS,
    THREADS,
    Configuration,
    TunedConfiguration,
    choose_configuration,
    count_words,
    load_configurations,
    write_configurations,
)
from gptfast.kernels.cuda.packing import PackedWeight

PRESETS = ("llama-3.1-8b", "llama-3.2-1b")
FORMATS = (INT4_G32, INT8, BF16, INT4_G128, FP8)
ROWS = (1, 5)
WORKING_SET_BYTES = 200_000_000
"""Distinct weights in a graph: more than the 50 MB that an H200's cache holds, several times."""
LEAST_GAIN = 0.02
"""Of the time, for which another configuration is taken: less is noise."""
RESERVE_S = 15
"""Left when tuning ends, to write and to spare."""
TITLE = "Products: microseconds, GB/s and share of the read bandwidth"

TUNED_TITLE = "Tuning: rows, words, warps and stages of a program"
CONFIGURATION_FILE = "gptfast/kernels/cuda/configurations.py, its rules for this GPU"
SAME = 6e-3
"""Relative difference of results that rounding to bfloat16 explains."""


@dataclass(frozen=True)
class Time:
    """Seconds of one product, and the bytes of weights that it reads."""

    seconds: float
    n_bytes: int

    @property
    def gb_per_s(self) -> float:
        """GB of weights a second."""
        return self.n_bytes / self.seconds / 1e9


def run(findings: Findings) -> None:
    """Time the products of both models, then tune them while there is time."""
    from triton.runtime.errors import OutOfResources

    device = find_device()
    capability = torch.cuda.get_device_capability(device)
    bandwidth = find_bandwidth(findings, device)
    findings.note(read_gb_per_s=bandwidth)
    layers = [(preset, *layer) for preset in PRESETS for layer in list_layers(get_preset(preset)).items()]
    pool = open_pool()
    try:
        cases = list(itertools.product(FORMATS, layers, ROWS))
        products = {Product(form, *shape, rows): None for form, (_, _, shape), rows in cases}
        errors = [future.result() for future in [pool.submit(compile_call, each, capability) for each in products]]
        findings.note(compile_errors=[error for error in errors if error is not None])
        for form, (preset, name, shape) in itertools.product(FORMATS, layers):
            weights = make_weights(device, form, shape, WORKING_SET_BYTES)
            for rows in ROWS:
                try:
                    found = time_weights(weights, draw_inputs(device, rows, shape[1]))
                except OutOfResources as error:
                    case = f"{form.name}, {shape[0]} x {shape[1]}, {rows} rows"
                    findings.check(f"{case}: it can be launched", False, str(error), CONFIGURATION_FILE)
                    continue
                row = describe_time(form, shape, rows, found, bandwidth)
                findings.add_row(TITLE, {"model": preset, "layer": name} | row)
        shapes = dict.fromkeys((form, shape) for form, (_, _, shape) in itertools.product(FORMATS, layers))
        tune_all(findings, device, list(shapes), pool, capability)
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


def list_layers(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """The shapes (out_features, in_features) of a model's products by name."""
    q_dim, kv_dim = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    return {
        "wqkv": (q_dim + 2 * kv_dim, config.dim),
        "wo": (config.dim, q_dim),
        "w13": (2 * config.ffn_dim, config.dim),
        "w2": (config.dim, config.ffn_dim),
        "head": (config.vocab_size, config.dim),
    }


def make_weights(device: torch.device, form: Format, shape: tuple[int, int], n_bytes: int) -> list[PackedWeight]:
    """So many distinct matrices that they have as many bytes at least."""
    generator = torch.Generator(device).manual_seed(0)
    weights = [draw_packed(form, *shape, generator)]
    while len(weights) * count_bytes(weights[0]) < n_bytes:
        weights.append(draw_packed(form, *shape, generator))
    return weights


def draw_inputs(device: torch.device, rows: int, in_features: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normal inputs (rows, in_features)."""
    generator = torch.Generator(device).manual_seed(1)
    return torch.randn(rows, in_features, device=device, generator=generator).to(dtype)


def time_weights(weights: Sequence[PackedWeight], x: Tensor) -> Time:
    """The time of one product, of a graph that multiplies by each matrix once."""
    products = [prepare_product(x, weight) for weight in weights]

    def work() -> None:
        for product in products:
            product()

    return Time(measure_work(work, x.device) / len(weights), count_bytes(weights[0]))


def tune_all(
    findings: Findings,
    device: torch.device,
    shapes: Sequence[tuple[Format, tuple[int, int]]],
    pool: Executor,
    capability: tuple[int, int],
) -> None:
    """Try the candidates of each product while there is time, and write the GPU's file with the best of them."""
    lines = dict(load_configurations(f"sm_{capability[0]}{capability[1]}"))
    products = [Product(form, *shape, rows) for (form, shape), rows in itertools.product(shapes, ROWS)]
    candidates = {product: list_candidates(product, find_configuration(product, capability)) for product in products}
    compiled = {
        (product, candidate): pool.submit(compile_call, replace(product, configuration=candidate), capability)
        for product in products
        for candidate in candidates[product]
    }
    for n_tuned, product in enumerate(products):
        if findings.get_remaining_s() < RESERVE_S:
            findings.note(untuned=len(products) - n_tuned)
            break
        errors = {each: compiled[product, each].result() for each in candidates[product]}
        works = [each for each, error in errors.items() if error is None]
        weights = make_weights(device, product.form, (product.out_features, product.in_features), WORKING_SET_BYTES)
        tuned = tune_product(findings, product, weights, works)
        line = make_line(product, tuned, lines)
        lines[line.kind, line.several_rows, line.out_features, line.in_features, line.group_size] = line
        with replace_atomically(findings.out / "configurations.json") as partial:
            write_configurations(partial, lines.values())
        del weights
        free_memory(device)


def tune_product(
    findings: Findings, product: Product, weights: Sequence[PackedWeight], candidates: Sequence[Configuration]
) -> Configuration:
    """The fastest of the candidates, of which the first is the one in use and stays unless another one gains enough.

    One whose result differs from the first's by more than rounding fails a check.
    """
    from triton.runtime.errors import OutOfResources

    x = draw_inputs(weights[0].words.device, product.rows, product.in_features)
    first, best = candidates[0], candidates[0]
    times: dict[Configuration, Time] = {}
    expected: Tensor | None = None
    for candidate in candidates:
        try:
            with configured(candidate):
                found = prepare_product(x, weights[0])()
                times[candidate] = time_weights(weights, x)
        except OutOfResources:
            continue
        expected = found if expected is None else expected
        difference = float((found.float() - expected.float()).norm() / expected.float().norm())
        if not difference < SAME:
            findings.check(
                f"{product} is the same as {candidate}",
                False,
                f"relative difference {difference:.2g}",
                "gptfast/kernels/cuda/linear.py at this configuration",
            )
            del times[candidate]
    if first in times:
        limit = (1 - LEAST_GAIN) * times[first].seconds
        best = min(times, key=lambda each: times[each].seconds)
        best = best if times[best].seconds < limit else first
        findings.add_row(
            TUNED_TITLE,
            {
                "weights": product.form.name,
                "shape": f"{product.out_features} x {product.in_features}",
                "rows": str(product.rows),
                "in use": describe_configuration(first),
                "us": f"{1e6 * times[first].seconds:.2f}",
                "best": describe_configuration(best),
                "us of it": f"{1e6 * times[best].seconds:.2f}",
                "tried": str(len(times)),
            },
        )
    return best


def describe_configuration(configuration: Configuration) -> str:
    """Its numbers."""
    return "/".join(map(str, dataclasses.astuple(configuration)))


def find_configuration(product: Product, capability: tuple[int, int] | None) -> Configuration:
    """The one in use."""
    weight = describe_packed(product.form, product.out_features, product.in_features)
    return choose_configuration(
        product.form.kind, product.rows, product.out_features, weight.width, find_group_size(weight), capability
    )


def find_group_size(weight: PackedWeight) -> int:
    """As configurations are found by: 0 for one scale per row or none."""
    return 0 if weight.scales is None or weight.scales.shape[1] == 1 else weight.group_size


def list_candidates(product: Product, base: Configuration) -> list[Configuration]:
    """Configurations to try, the one in use first."""
    candidates = [base]
    if product.rows == 1:
        per_warp = THREADS * THREAD_WORDS[product.form.kind]
        for block_rows, words in itertools.product((2, 4, 8), (base.block_words, base.block_words // 2)):
            for warps in (words // per_warp, 2 * words // per_warp):
                if 1 <= warps <= MAX_WARPS and words % (THREADS * LOAD_WORDS * warps) == 0:
                    candidates.append(Configuration(block_rows, words, warps))
    else:
        words = count_words(product.form.kind, product.in_features)
        columns = 2 * words if product.form.kind in ("bf16", "fp16") else words
        for stages, block_rows, factor, splits in (
            *((stages, base.block_rows, 1, base.splits) for stages in (2, 3, 6, 8)),
            *((base.stages, block_rows, 1, base.splits) for block_rows in (16, 32, 64)),
            *((base.stages, base.block_rows, 1, splits) for splits in (1, 2, 4, 8)),
            *((stages, base.block_rows, 2, base.splits) for stages in (3, base.stages)),
        ):
            block_words, warps = factor * base.block_words, max(splits, block_rows // 16)
            if splits == 1 or columns % (splits * block_words) == 0:
                candidates.append(Configuration(block_rows, block_words, warps, stages, splits))
    return list(dict.fromkeys(candidates))


def make_line(
    product: Product, configuration: Configuration, lines: Mapping[Any, TunedConfiguration]
) -> TunedConfiguration:
    """The product's line of the GPU's file.

    The bound on instructions is that of the line before; of one that there was not, the loosest of its kind on sm_90,
    or none. The tests of compiled code decide whether the configuration keeps it.
    """
    weight = describe_packed(product.form, product.out_features, product.in_features)
    key = (product.form.kind, product.rows > 1, product.out_features, weight.width, find_group_size(weight))
    known = [lines[key]] if key in lines else load_configurations("sm_90").values()
    bounds = [line.max_instructions_per_weight for line in known if (line.kind, line.several_rows) == key[:2]]
    return TunedConfiguration(*key, configuration, max(bounds, default=math.inf))
