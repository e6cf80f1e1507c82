"""A graph back end for the CPU that runs steps instead of recording them, and holds them to the rules of recordings.

What a CUDA graph cannot do fails here: ask the host for a value, meet a tensor at another address than when it was
recorded, do other operations, or leave something behind that it allocated itself. Kernels of the fused pass, which are
launched by no operator of their own, count as operations too.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gptfast.fused import run_pass
from gptfast.graphs import WARM_UPS, Fetched, Replay

HOST_READS = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "equal",
    "is_nonzero",
    "item",
    "unique_dim",
    "_unique2",
)
"""Operators that bring a value to the host, or have a shape that depends on one."""


class BrokenRule(AssertionError):
    """A step did what a recording cannot."""


class RuleKeeper(TorchDispatchMode):
    """Writes down the operators of a step, and at which addresses they met tensors that the step did not make."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[str, tuple[int, ...]]] = []
        self.made: list[weakref.ref[Tensor]] = []
        self._own_storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        inputs = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        is_masked = name.startswith("aten.index") and any(value.dtype == torch.bool for value in inputs[1:])
        if is_masked or any(f".{read}." in f".{name}." for read in HOST_READS):
            raise BrokenRule(f"{name} brings a value to the host")
        self.log.append((name, tuple(value.data_ptr() for value in inputs if not self._is_own(value))))
        if name == "gptfast.fused_pass.default":
            # All that it does is looked at, as if it were no operator.
            with self, noting_launches(self):
                outputs = run_pass(*args)
        else:
            outputs = func(*args, **(kwargs or {}))
        known = {value.untyped_storage().data_ptr() for value in inputs}
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, Tensor) and (address := leaf.untyped_storage().data_ptr()) not in known:
                self._own_storages.add(address)
                self.made.append(weakref.ref(leaf))
        return outputs

    def note_launch(self, name: str, arguments: Iterable[Any]) -> None:
        """Write down a kernel and where its tensors lie."""
        tensors = [value for value in arguments if isinstance(value, Tensor)]
        self.log.append((name, tuple(value.data_ptr() for value in tensors if not self._is_own(value))))

    def _is_own(self, value: Tensor) -> bool:
        return value.untyped_storage().data_ptr() in self._own_storages


@contextlib.contextmanager
def noting_launches(keeper: RuleKeeper) -> Iterator[None]:
    """Within, every kernel that Triton's interpreter runs is written down."""
    from triton.runtime.interpreter import GridExecutor

    run = GridExecutor.__call__

    def note(executor: Any, *arguments: Any, **options: Any) -> Any:
        keeper.note_launch(executor.fn.__name__, (*arguments, *options.values()))
        return run(executor, *arguments, **options)

    with patch.object(GridExecutor, "__call__", note):
        yield


@dataclass
class CheckedGraphs:
    """A `GraphBackend`; `recorded` and `replayed` count, and `most_in_flight` is of replays that were not fetched."""

    recorded: int = 0
    replayed: int = 0
    in_flight: int = 0
    most_in_flight: int = 0
    logs: list[list[tuple[str, tuple[int, ...]]]] = field(default_factory=list)

    def record(self, function: Callable[[], None]) -> Replay:
        """See `GraphBackend.record`; every replay is compared with the run that stands for the recording."""
        for _ in range(WARM_UPS):
            function()
        expected = self._run(function)
        self.recorded += 1
        self.logs.append(expected)

        def replay() -> None:
            self.replayed += 1
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            if (found := self._run(function)) != expected:
                raise BrokenRule(f"a replay differs from the recording in {list_differences(found, expected)}")

        return replay

    def fetch(self, source: Tensor) -> Fetched:
        """See `GraphBackend.fetch`."""
        copy = source.clone()

        def wait() -> list[Any]:
            self.in_flight -= 1
            values: list[Any] = copy.tolist()
            return values

        return wait

    def _run(self, function: Callable[[], None]) -> list[tuple[str, tuple[int, ...]]]:
        with RuleKeeper() as keeper:
            function()
        if any(reference() is not None for reference in keeper.made):
            gc.collect()  # it may be a cycle that no one holds
        if left := [value for reference in keeper.made if (value := reference()) is not None]:
            raise BrokenRule(f"the step leaves {len(left)} tensors behind that it made, one of {tuple(left[0].shape)}")
        return keeper.log


def list_differences(found: list[Any], expected: list[Any]) -> Iterator[Any]:
    """The first operators that are not alike."""
    return [pair for pair in zip(found, expected, strict=False) if pair[0] != pair[1]][:3] or [
        len(found),
        len(expected),
    ]
