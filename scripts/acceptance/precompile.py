"""Products as they are launched, and their kernels compiled before that in several processes: each takes a second.

What is compiled lies in Triton's own cache, where the process that launches it finds it.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from acceptance.random_weights import Format, describe_packed
from gptfast.kernels.cuda import ops
from gptfast.kernels.cuda.configurations import MAX_ROWS, Configuration, choose_configuration
from gptfast.kernels.cuda.packing import PackedWeight, arrange_inputs, arrange_rows

MOST_WORKERS = 12


@dataclass(frozen=True)
class Product:
    """A product with a matrix (out_features, in_features) of that form.

    Attributes:
        rows: of inputs.
        exact_rows: whether a single one is computed as several are.
        configuration: None for the one that the operators choose.
    """

    form: Format
    out_features: int
    in_features: int
    rows: int
    exact_rows: bool = False
    configuration: Configuration | None = None

    def make(self) -> None:
        """Compute it, of tensors on torch's default device that hold anything."""
        weight = describe_packed(self.form, self.out_features, self.in_features)
        x = torch.empty(self.rows, self.in_features, dtype=torch.bfloat16)
        prepare_product(x, weight, exact_rows=self.exact_rows)()


@dataclass(frozen=True)
class Attention:
    """Attention of so many tokens, in bfloat16 with that cache."""

    query_heads: int
    kv_heads: int
    head_dim: int
    tokens: int
    cache_dtype: torch.dtype

    def make(self) -> None:
        """See `Product.make`; the length of the cache changes nothing of what is compiled."""
        from gptfast.kernels.cuda import attention

        q = torch.empty(1, self.tokens, self.query_heads, self.head_dim, dtype=torch.bfloat16)
        k, v = (torch.empty(1, self.kv_heads, 1024, self.head_dim, dtype=self.cache_dtype) for _ in range(2))
        scales = torch.empty(1, self.kv_heads, 1024, 1) if self.cache_dtype == torch.int8 else None
        input_pos = torch.zeros(self.tokens, dtype=torch.int64)
        attention.attend(q, k, v, input_pos, k_scales=scales, v_scales=scales)


Call = Product | Attention


def prepare_product(x: Tensor, weight: PackedWeight, *, exact_rows: bool = False) -> Callable[[], Tensor]:
    """The product of inputs (M, K) with a matrix, (M, N): the kernel alone, with the inputs in its order."""
    tensors = weight.words, weight.scales, weight.mins, None
    if x.shape[0] > MAX_ROWS:
        return functools.partial(ops.multiply_matrix, x, *tensors, weight.kind)
    if x.shape[0] == 1 and not exact_rows:
        inputs = arrange_inputs(x, weight.kind).contiguous()
        return functools.partial(ops.multiply_vector, inputs, *tensors, weight.kind, x.dtype)
    return functools.partial(ops.multiply_rows, arrange_rows(x, weight.kind).contiguous(), *tensors, weight.kind)


@contextlib.contextmanager
def configured(configuration: Configuration | None, capability: tuple[int, int] | None = None) -> Iterator[None]:
    """Within, products have this configuration, or that of a GPU of this capability where there is none."""

    def choose(*arguments: Any, **options: Any) -> Configuration:
        if configuration is not None:
            return configuration
        return choose_configuration(*arguments[:5], capability or arguments[5], **options)

    with patch.object(ops, "choose_configuration", choose):
        yield


def open_pool() -> Executor:
    """Processes to compile in; none begins before there is something to do."""
    workers = max(1, min(MOST_WORKERS, len(os.sched_getaffinity(0))))
    return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))


def compile_all(calls: Sequence[Call], capability: tuple[int, int]) -> dict[str, str]:
    """Compile the kernels of all; what went wrong, by call."""
    with open_pool() as pool:
        futures = {call: pool.submit(compile_call, call, capability) for call in dict.fromkeys(calls)}
        results = {str(call): future.result() for call, future in futures.items()}
    return {call: error for call, error in results.items() if error is not None}


def compile_call(call: Call, capability: tuple[int, int]) -> str | None:
    """Compile the kernels of a call, without a launch, for the GPU that Triton finds; what went wrong, if it did."""
    try:
        warm_up(call, capability)
    except Exception as error:  # of any kind: whoever launches it meets it again
        return f"{type(error).__name__}: {str(error).strip()[:500]}"
    return None


def warm_up(call: Call, capability: tuple[int, int]) -> None:
    """Make the call on tensors without memory, with kernels that are compiled where they would be launched."""
    from triton.runtime.jit import JITFunction

    def warm(kernel: Any, grid: Any) -> Callable[..., Any]:
        def compile_for(*arguments: Any, **options: Any) -> Any:
            # Triton takes dtypes for tensors, whose addresses are multiples of 16.
            types = [value.dtype if isinstance(value, Tensor) else value for value in arguments]
            return kernel.warmup(*types, grid=grid, **options)

        return compile_for

    configuration = call.configuration if isinstance(call, Product) else None
    with torch.device("meta"), patch.object(JITFunction, "__getitem__", warm), configured(configuration, capability):
        call.make()
