"""The fastest of several configurations of a product on the GPU at hand, found by timing each of them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from gptfast.config import ModelConfig
from gptfast.errors import UserError
from gptfast.kernels.cuda import ops
from gptfast.kernels.cuda.configurations import (
    THREAD_WORDS,
    THREADS,
    Configuration,
    Gpu,
    Key,
    TunedConfiguration,
    Tuning,
    find_fault,
    find_lines,
    identify_gpu,
    load_shipped,
    name_architecture,
    write_tuning,
)
from gptfast.kernels.cuda.packing import PackedWeight
from gptfast.kernels.cuda.precompilation import compile_call
from gptfast.kernels.cuda.products import Format, Product, count_bytes, draw_packed, prepare_product
from gptfast.kernels.cuda.timing import free_memory, measure_work
from gptfast.kernels.ops import choose_kernels

ROWS = (1, 5)
"""Of inputs: one, and 5 for all that is more than one: the kernel computes 16 whatever there are."""
WORKING_SET_BYTES = 200_000_000
"""Distinct weights in a graph: more than the 50 MB that an H200's cache holds, several times."""
MOST_MATRICES = 2048
"""In a graph. Of those so small that this is less than the working set, launching takes longer than reading."""
LEAST_GAIN = 0.02
"""Of the time, for which another configuration is taken: less is noise."""
SAME = 6e-3
"""Relative difference of results that rounding to bfloat16 explains."""

Timer = Callable[[Callable[[], None], torch.device], float]
"""The seconds of some work on a device."""


@dataclass(frozen=True)
class Time:
    """Seconds of one product, and the bytes of weights that it reads."""

    seconds: float
    n_bytes: int

    @property
    def gb_per_s(self) -> float:
        """GB of weights a second."""
        return self.n_bytes / self.seconds / 1e9


@dataclass(frozen=True)
class TunedProduct:
    """What timing a product's configurations found.

    Attributes:
        in_use: the configuration that it had.
        times: of those that could be launched and were right.
        differences: of those that were not, the relative one of their results from the library's.
    """

    product: Product
    in_use: Configuration
    times: Mapping[Configuration, Time] = field(default_factory=dict)
    differences: Mapping[Configuration, float] = field(default_factory=dict)

    @property
    def best(self) -> Configuration:
        """The fastest, but the one in use unless it gains enough; also where none was timed."""
        if not self.times:
            return self.in_use
        best = min(self.times, key=lambda each: self.times[each].seconds)
        if self.in_use not in self.times:
            return best
        limit_s = (1 - LEAST_GAIN) * self.times[self.in_use].seconds
        return best if self.times[best].seconds < limit_s else self.in_use


def choose_gpu() -> torch.device:
    """The GPU at hand; raises UserError where there is none that the kernels run on."""
    if not torch.cuda.is_available():
        raise UserError("tuning times kernels and torch finds no CUDA GPU here; run it where one is")
    device = torch.device("cuda", torch.cuda.current_device())
    if choose_kernels(device) != "triton":
        gpu = identify_gpu(device)
        raise UserError(f"the kernels need Triton and sm_80 or later, and this is {gpu.name}, {name_architecture(gpu)}")
    return device


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


def list_candidates(product: Product, in_use: Configuration) -> list[Configuration]:
    """Configurations to try, the one in use first."""
    candidates = []
    kind = product.form.kind
    several_rows = product.key[1]
    if several_rows:
        for stages, block_rows, factor, splits in (
            *((stages, in_use.block_rows, 1, in_use.splits) for stages in (2, 3, 6, 8)),
            *((in_use.stages, block_rows, 1, in_use.splits) for block_rows in (16, 32, 64)),
            *((in_use.stages, in_use.block_rows, 1, splits) for splits in (1, 2, 4, 8)),
            *((stages, in_use.block_rows, 2, in_use.splits) for stages in (3, in_use.stages)),
        ):
            warps = max(splits, block_rows // 16)
            candidates.append(Configuration(block_rows, factor * in_use.block_words, warps, stages, splits))
    else:
        per_warp = THREADS * THREAD_WORDS[kind]
        for block_rows, words in itertools.product((2, 4, 8), (in_use.block_words, in_use.block_words // 2)):
            for warps in (in_use.warps, words // per_warp, 2 * words // per_warp):
                candidates.append(Configuration(block_rows, words, warps))
    legal = [each for each in candidates if find_fault(kind, several_rows, product.in_features, each) is None]
    return list(dict.fromkeys([in_use, *legal]))


def make_weights(device: torch.device, form: Format, shape: tuple[int, int], n_bytes: int) -> list[PackedWeight]:
    """So many distinct matrices that they have as many bytes at least, up to `MOST_MATRICES`."""
    generator = torch.Generator(device).manual_seed(0)
    first = draw_packed(form, *shape, generator)
    count = min(MOST_MATRICES, max(1, math.ceil(n_bytes / count_bytes(first))))
    return [first, *(draw_packed(form, *shape, generator) for _ in range(count - 1))]


def draw_inputs(device: torch.device, rows: int, in_features: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normal inputs (rows, in_features)."""
    generator = torch.Generator(device).manual_seed(1)
    return torch.randn(rows, in_features, device=device, generator=generator).to(dtype)


def time_weights(
    weights: Sequence[PackedWeight],
    x: Tensor,
    *,
    exact_rows: bool = False,
    configuration: Configuration | None = None,
    timer: Timer = measure_work,
) -> Time:
    """The time of one product, of a graph that multiplies by each matrix once."""
    products = [prepare_product(x, each, exact_rows=exact_rows, configuration=configuration) for each in weights]

    def work() -> None:
        for product in products:
            product()

    return Time(timer(work, x.device) / len(weights), count_bytes(weights[0]))


def tune_product(
    product: Product,
    in_use: Configuration,
    candidates: Sequence[Configuration],
    weights: Sequence[PackedWeight],
    x: Tensor,
    *,
    timer: Timer = measure_work,
) -> TunedProduct:
    """Time the candidates.

    One that the GPU has no room for is left out, and so is one whose result differs from the library's product with the
    expanded matrix by more than rounding does.
    """
    from triton.runtime.errors import OutOfResources

    weight = weights[0]
    expected = ops.multiply_matrix(x, weight.words, weight.scales, weight.mins, None, weight.kind).float()
    times: dict[Configuration, Time] = {}
    differences: dict[Configuration, float] = {}
    for candidate in candidates:
        try:
            found = prepare_product(x, weight, exact_rows=product.exact_rows, configuration=candidate)().float()
            difference = float((found - expected).norm() / expected.norm())
            if difference < SAME:
                times[candidate] = time_weights(
                    weights, x, exact_rows=product.exact_rows, configuration=candidate, timer=timer
                )
            else:
                differences[candidate] = difference
        except OutOfResources:
            continue
    return TunedProduct(product, in_use, times, differences)


def tune_products(
    products: Sequence[Product],
    device: torch.device,
    gpu: Gpu,
    pool: Executor,
    path: Path,
    tuning: Tuning,
    *,
    get_remaining_s: Callable[[], float],
    dtype: torch.dtype = torch.bfloat16,
    timer: Timer = measure_work,
) -> Iterator[TunedProduct]:
    """Tune products one after the other, while there is time, and write each to a GPU's file before it is yielded.

    Args:
        products: those with one matrix follow each other, as its copies are then made once.
        device: where they are timed.
        gpu: what that is.
        pool: where candidates are compiled before.
        path: of the file.
        tuning: what the file is to hold beside them.
        get_remaining_s: seconds that are left; none is begun where there are none, or the pool takes longer.
        dtype: of inputs.
        timer: what tells the seconds of work.
    """
    lines = find_lines(gpu)
    candidates = {each: list_candidates(each, each.find_configuration(gpu)) for each in products}
    compiled: dict[Product, list[Future[str | None]]] = {
        product: [
            pool.submit(compile_call, dataclasses.replace(product, configuration=candidate), gpu)
            for candidate in candidates[product]
        ]
        for product in products
    }
    for (form, shape), same in itertools.groupby(products, lambda each: (each.form, each.shape)):
        weights: list[PackedWeight] = []
        for product in same:
            futures = compiled[product]
            if wait(futures, max(0.0, get_remaining_s())).not_done or get_remaining_s() <= 0:
                return
            weights = weights or make_weights(device, form, shape, WORKING_SET_BYTES)
            works = [each for each, future in zip(candidates[product], futures, strict=True) if future.result() is None]
            x = draw_inputs(device, product.rows, product.in_features, dtype)
            found = tune_product(product, candidates[product][0], works, weights, x, timer=timer)
            if found.times:
                tuning = tuning.replace_line(make_line(product, found.best, lines)).stamp()
                write_tuning(path, tuning)
            yield found
        del weights
        free_memory(device)


def make_line(
    product: Product, configuration: Configuration, lines: Mapping[Key, TunedConfiguration]
) -> TunedConfiguration:
    """The product's line of the GPU's file.

    The bound on instructions is that of the line before; of one that there was not, the loosest of its kind on sm_90,
    or none. The tests of compiled code decide whether the configuration keeps it.
    """
    key = product.key
    shipped = load_shipped("sm_90")
    known = [lines[key]] if key in lines else [] if shipped is None else shipped.products
    bounds = [line.max_instructions_per_weight for line in known if line.key[:2] == key[:2]]
    return TunedConfiguration(*key, configuration, max((each for each in bounds if each is not None), default=None))
