"""Time the kernels of a decode step one by one, and tell by their arguments which part of the model each belongs to.

Three kinds of call reach the machine: functions that Inductor generated, which stand as globals in modules that it
generated too; operators that such a module calls through torch; and, in an eager step, every operator. Each is
wrapped for as long as the timer is active, by replacing it where it is looked up: a wrapper costs 2 microseconds a
call. torch's profiler would not do, as the names that it records do not tell whose weights a kernel reads.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from gptfast.linear import PackedEmbedding, PackedLinear, TritonEmbedding, TritonLinear
from gptfast.model import Transformer

GENERATED_KERNEL_PREFIXES = ("cpp_fused", "triton_")
ATTENTION_NAMES = ("scaled_dot_product", "gptfast.attention", "gptfast.cuda_attention")
LOOKUP_NAMES = ("aten.embedding.default", "gptfast.embedding.default")
"""Operators that read one row of a matrix for each token."""
ATTENTION = "attention"
POINTWISE = "norms, rope, residuals"

Stamp = Any
"""A moment: seconds on a CPU, a recorded event on CUDA."""


@dataclass(frozen=True)
class TimedCall:
    """One kernel of a step: the part of the model that it belongs to, and how long it ran."""

    part: str
    seconds: float


class KernelTimer:
    """Times what a step of this model calls, within `active`; `take_calls` hands out what came since the last time."""

    def __init__(self, model: Transformer, *, is_compiled: bool) -> None:
        self._is_compiled = is_compiled
        self._device = model.tok_embeddings.weight.device
        self._owners = map_weights_to_parts(model)
        self._spans: list[tuple[Stamp, Stamp]] = []
        # Every step makes the same calls, so a call's part is found once and then known by its place.
        self._parts: list[str] = []

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Within, every kernel is timed."""
        with contextlib.ExitStack() as stack:
            if self._is_compiled:
                self._wrap_generated_kernels(stack)
                stack.enter_context(patch.object(OpOverload, "__call__", self._wrap_operator(OpOverload.__call__)))
            else:
                stack.enter_context(_OperatorTimer(self._time))
            yield

    def take_calls(self) -> list[TimedCall]:
        """The calls of one step, in their order; none if they were not those of the step before, as after the first."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            seconds = [start.elapsed_time(end) / 1e3 for start, end in self._spans]
        else:
            seconds = [end - start for start, end in self._spans]
        self._spans = []
        if len(seconds) != len(self._parts):
            self._parts = []
            return []
        return [TimedCall(part, span) for part, span in zip(self._parts, seconds, strict=True)]

    def _wrap_generated_kernels(self, stack: contextlib.ExitStack) -> None:
        from torch._inductor.codecache import PyCodeCache
        from torch._inductor.select_algorithm import extern_kernels

        for module in PyCodeCache.modules:
            for name, kernel in list(vars(module).items()):
                if name.startswith(GENERATED_KERNEL_PREFIXES):
                    # A C++ kernel is called as it is, a Triton kernel through its method `run`.
                    owner, attribute = (kernel, "run") if hasattr(kernel, "run") else (module, name)
                    wrapped = self._wrap(name, getattr(owner, attribute))
                    stack.enter_context(patch.object(owner, attribute, wrapped))
        for name in ("mm", "addmm", "bmm", "baddbmm"):  # the library's products, which all modules share
            stack.enter_context(patch.object(extern_kernels, name, self._wrap(name, getattr(extern_kernels, name))))

    def _wrap(self, name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._time(name, kernel, *args, **kwargs)

        return call

    def _wrap_operator(self, call_operator: Callable[..., Any]) -> Callable[..., Any]:
        def call(operator: OpOverload[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            return self._time(str(operator), call_operator, operator, *args, **kwargs)

        return call

    def _time(self, name: str, kernel: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        start = self._stamp()
        result = kernel(*args, **kwargs)
        self._spans.append((start, self._stamp()))
        if len(self._spans) > len(self._parts):
            self._parts.append(self._find_part(name, args))
        return result

    def _stamp(self) -> Stamp:
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            return event
        return time.perf_counter()

    def _find_part(self, name: str, args: Sequence[Any]) -> str:
        if any(attention in name for attention in ATTENTION_NAMES):
            return ATTENTION
        if name in LOOKUP_NAMES:
            return POINTWISE
        storages = [arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)]
        parts = dict.fromkeys(self._owners[storage] for storage in storages if storage in self._owners)
        return " + ".join(parts) or POINTWISE


class _OperatorTimer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Has every operator timed that does more than look at a tensor in another shape."""

    def __init__(self, time_call: Callable[..., Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._time_call = time_call

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator.is_view:
            return operator(*args, **(kwargs or {}))
        return self._time_call(str(operator), operator, *args, **(kwargs or {}))


def map_weights_to_parts(model: Transformer) -> dict[int, str]:
    """The addresses of the weights that products read, each with its part."""
    return {weight.untyped_storage().data_ptr(): part for part, weight in list_products(model)}


def list_products(model: Transformer) -> list[tuple[str, Tensor]]:
    """Every matrix that a step multiplies with, beside the kind of its layer: `feed_forward.w2`, or `output`.

    A tied embedding is the output layer. A packed layer may hold several matrices, each as a vector of bytes.
    """
    products = [("output", weight) for weight in list_matrices(model.output or model.tok_embeddings)]
    for name, module in model.layers.named_modules():
        _, _, part = name.partition(".")
        products += [(part, weight) for weight in list_matrices(module)]
    return products


def list_matrices(module: nn.Module) -> list[Tensor]:
    """The matrices that a layer itself holds, as they lie in memory; none if it is no product or embedding."""
    if isinstance(module, PackedLinear | PackedEmbedding | TritonLinear | TritonEmbedding):
        return [weight for _, weight in module.list_matrices()]
    return [module.weight] if isinstance(module, nn.Linear | nn.Embedding) else []
