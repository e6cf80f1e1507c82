"""Kernels compiled before they are launched, in several processes, as each takes a second.

What is compiled lies in Triton's own cache, where the process that launches it finds it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor
from typing import Any, Protocol
from unittest.mock import patch

import torch
from torch import Tensor

from gptfast.kernels.cuda.configurations import Gpu

MOST_WORKERS = 12


class Call(Protocol):
    """What launches kernels."""

    def make(self, gpu: Gpu | None) -> object:
        """Launch them as on that GPU, on tensors of torch's default device that hold anything."""


def open_pool() -> Executor:
    """Processes to compile in; none begins before there is something to do."""
    workers = max(1, min(MOST_WORKERS, len(os.sched_getaffinity(0))))
    # Ctrl-C reaches them too, but it is their parent that answers it.
    return ProcessPoolExecutor(
        workers,
        multiprocessing.get_context("spawn"),
        initializer=signal.signal,
        initargs=(signal.SIGINT, signal.SIG_IGN),
    )


def compile_call(call: Call, gpu: Gpu) -> str | None:
    """Compile the kernels of a call, without a launch, for the GPU that Triton finds; what went wrong, if it did."""
    try:
        warm_up(call, gpu)
    except Exception as error:  # of any kind: whoever launches it meets it again
        return f"{type(error).__name__}: {str(error).strip()[:500]}"
    return None


def warm_up(call: Call, gpu: Gpu) -> None:
    """Make the call on tensors without memory, with kernels that are compiled where they would be launched."""
    from triton.runtime.jit import JITFunction

    def warm(kernel: Any, grid: Any) -> Callable[..., Any]:
        def compile_for(*arguments: Any, **options: Any) -> Any:
            # Triton takes dtypes for tensors, whose addresses are multiples of 16.
            types = [value.dtype if isinstance(value, Tensor) else value for value in arguments]
            return kernel.warmup(*types, grid=grid, **options)

        return compile_for

    with torch.device("meta"), patch.object(JITFunction, "__getitem__", warm):
        call.make(gpu)
