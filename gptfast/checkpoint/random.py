"""Random weights in a preset's shapes: to measure speed where no checkpoint is at hand."""

from __future__ import annotations

import math
import zlib
from pathlib import Path

import torch
from torch import Tensor

from gptfast.checkpoint.base import Checkpoint
from gptfast.checkpoint.presets import get_preset
from gptfast.checkpoint.shapes import list_tensor_shapes
from gptfast.config import GenerationDefaults
from gptfast.quantization import QuantizedWeight, WeightScheme

FLOAT8_DEVIATION = 100.06
"""Of evenly distributed finite floats of 8 bits."""


class RandomCheckpoint(Checkpoint):
    """See `Checkpoint`. Every tensor is a function of its name alone, so runs can be compared; its dtype is bfloat16.

    Norms are 1 and matrices normal with the variance 1 / in_features, which keeps activations near size 1.
    """

    def __init__(self, preset: str) -> None:
        self.path = Path(preset)
        self.config = get_preset(preset)
        self.generation = GenerationDefaults()
        self._shapes = list_tensor_shapes(self.config)
        self.stored_bytes = 2 * sum(math.prod(shape) for shape in self._shapes.values())

    def names(self) -> frozenset[str]:
        """See `Checkpoint.names`."""
        return frozenset(self._shapes)

    def read(self, name: str) -> Tensor:
        """See `Checkpoint.read`."""
        tensor = torch.empty(self._shapes[name], dtype=torch.bfloat16)
        self.read_into(name, tensor)
        return tensor

    def read_into(self, name: str, out: Tensor) -> None:
        """See `Checkpoint.read_into`; drawn in `out`'s dtype, with no copy beside it."""
        if out.dim() == 1:
            out.fill_(0.0 if name.endswith(".bias") else 1.0)
            return
        generator = torch.Generator(out.device).manual_seed(zlib.crc32(name.encode()))
        out.normal_(0.0, out.shape[1] ** -0.5, generator=generator)

    def describe_type(self, name: str) -> str:
        """See `Checkpoint.describe_type`."""
        return "BF16"

    def read_rounded(self, name: str, shape: tuple[int, ...], scheme: WeightScheme) -> QuantizedWeight:
        """See `Checkpoint.read_rounded`; codes are drawn as they are, as rounding billions of weights takes minutes."""
        rows, columns = shape
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        if scheme.is_float:
            # All bytes but the two that are NaN, 127 and 255.
            codes = torch.empty(rows, columns, dtype=torch.uint8).random_(0, 254, generator=generator)
            codes += codes >= 127
            scales = torch.full((rows, 1), columns**-0.5 / FLOAT8_DEVIATION)
            return QuantizedWeight(codes.view(scheme.dtype), scales, scheme.bits)
        limit = 2 ** (scheme.bits - 1)
        codes = torch.empty(rows, columns, dtype=torch.int8).random_(-limit, limit, generator=generator)
        # Of evenly distributed codes the deviation is limit / sqrt(3).
        scale = columns**-0.5 * 3**0.5 / limit
        scales = torch.full((rows, columns // scheme.get_group_size(columns)), scale).bfloat16().float()
        return QuantizedWeight(codes, scales, scheme.bits)

    def load_tokenizer(self) -> None:
        """See `Checkpoint.load_tokenizer`."""

    def read_chat_template(self) -> None:
        """See `Checkpoint.read_chat_template`."""
