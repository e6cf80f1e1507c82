"""What every checkpoint offers, whatever its layout on disk.

Tensors go by the names of Meta's reference with nothing fused (`layers.0.attention.wq.weight`), and `wq` and
`wk` have the rotary pairs of a head D/2 apart, as Hugging Face stores them and the model computes.
"""

from __future__ import annotations

import abc
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from gptfast.chat import ChatTemplate
from gptfast.config import GenerationDefaults, ModelConfig
from gptfast.errors import CheckpointError
from gptfast.quantization import QuantizedWeight, WeightScheme, join_rows, slice_rows
from gptfast.rounding import round_to_nearest
from gptfast.tokenizer import Tokenizer

ROTARY_PROJECTIONS = ("wq", "wk")
"""The modules whose rows some layouts store with the rotary pairs interleaved."""
EXPANDED_AT_ONCE = 1 << 20
"""Elements: bounds the float32 copies that expanding a quantized matrix makes beside the finished weights."""
DTYPE_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
DENSE_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class Checkpoint(abc.ABC):
    """A model on disk: what it is, its tensors one at a time, its tokenizer.

    Attributes:
        path: the file or directory it was opened from.
        config: its architecture.
        generation: what it says about starting, ending and sampling text.
        stored_bytes: the size of its tensors as they lie on disk.
    """

    path: Path
    config: ModelConfig
    generation: GenerationDefaults
    stored_bytes: int

    @abc.abstractmethod
    def names(self) -> frozenset[str]:
        """The tensors there are, by canonical name; one with no such name keeps its own."""

    @abc.abstractmethod
    def read(self, name: str) -> Tensor:
        """The tensor in its stored dtype, or float32 if its blocks had to be dequantized.

        It may be a read-only view of the file. Raises CheckpointError if the file does not hold all of it.
        """

    def view(self, name: str) -> Tensor | None:
        """The tensor as a view of the mapped file, where it lies there as `read` returns it; else None."""
        return None

    def read_into(self, name: str, out: Tensor) -> None:
        """Copy the tensor into `out`, of the same shape and any floating dtype; see `iterate_rows`."""
        for rows, values in self.iterate_rows(name, tuple(out.shape)):
            out[rows] = values

    def iterate_rows(self, name: str, shape: tuple[int, ...]) -> Iterator[tuple[slice, Tensor]]:
        """The tensor as `read` returns it, in slices of its rows: one that is expanded never stands there whole.

        Raises CheckpointError where `read` does, and if the tensor is not of that shape.
        """
        tensor = self.read(name)
        check_tensor(self.path, name, tensor, shape)
        for rows in slice_rows(shape, EXPANDED_AT_ONCE):
            yield rows, tensor[rows]

    def read_quantized(self, name: str) -> QuantizedWeight | None:
        """The matrix as the file stores it, its rows in the order of `read`.

        None where it is stored dense, or in a type that has to be expanded. Raises CheckpointError where `read` does,
        and for a shape that the config does not ask for.
        """
        return None

    def read_rounded(self, name: str, shape: tuple[int, ...], scheme: WeightScheme) -> QuantizedWeight:
        """The matrix of that shape rounded to the nearest codes of `scheme`.

        Raises as `iterate_rows` and `round_to_nearest` do.
        """
        parts = self.iterate_rows(name, shape)
        return join_rows([round_to_nearest(values, scheme, name=name) for _, values in parts])

    @abc.abstractmethod
    def describe_type(self, name: str) -> str:
        """How the file stores the tensor, for reports: `BF16`, `Q4_1`, `int4 g32`."""

    @abc.abstractmethod
    def load_tokenizer(self) -> Tokenizer | None:
        """The checkpoint's own tokenizer; None for random weights, which have none."""

    @abc.abstractmethod
    def read_chat_template(self) -> ChatTemplate | None:
        """The checkpoint's own chat template; None for a base model."""


def check_tensor(path: Path, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise CheckpointError if a tensor is not of the shape that the config asks for, or not of real numbers."""
    check_shape(path, name, tuple(tensor.shape), shape)
    if not tensor.is_floating_point():
        raise CheckpointError(
            f"tensor {name} in {path} is stored as {tensor.dtype}, a quantization that is not supported; "
            "use a checkpoint in float32, float16 or bfloat16"
        )


def check_shape(path: Path, name: str, found: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Raise CheckpointError if the shape that a tensor is `found` to have is not that which the config asks for."""
    if found != shape:
        raise CheckpointError(
            f"tensor {name} in {path} has shape {list(found)} but its config asks for {list(shape)}; "
            "the weights and the config are not of the same model"
        )


def check_finite(path: Path, name: str, values: Tensor) -> None:
    """Raise CheckpointError for NaN or infinite weights, of which every token would be the first one."""
    if values.dtype == torch.float8_e4m3fn:
        # It has no infinity, and NaN is all ones below the sign; torch's own `isnan` takes ten times as long (two cores
        # of an AMD EPYC, 2026-12-01).
        parts = (values[rows].view(torch.uint8) for rows in slice_rows(tuple(values.shape), EXPANDED_AT_ONCE))
        is_finite = all(int((part & 0x7F).amax()) < 0x7F for part in parts)
    else:
        is_finite = all(map(torch.isfinite, torch.aminmax(values)))
    if not is_finite:
        raise CheckpointError(
            f"tensor {name} in {path} holds NaN or infinite numbers; the file is damaged, so download it again"
        )


def canonicalize_name(name: str, layer_name: re.Pattern[str], modules: Mapping[str, str]) -> str:
    """Meta's name of a tensor that goes by another one; an unknown name comes back as it is.

    `layer_name` matches the names within a block as (number, module, weight or bias), and `modules` translates them.
    """
    if match := layer_name.fullmatch(name):
        number, module, kind = match.groups()
        return f"layers.{number}.{modules[module]}.{kind}" if module in modules else name
    module, _, kind = name.rpartition(".")
    return f"{modules[module]}.{kind}" if module in modules else name


def deinterleave_rotary_rows(weight: Tensor, head_dim: int) -> Tensor:
    """Reorder the rows (heads * D, ...) of `wq` or `wk` from rotary pairs (2i, 2i + 1) to (i, i + D/2)."""
    return weight.view(-1, head_dim // 2, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)
