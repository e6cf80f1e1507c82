"""What a model is made of and whether it fits, computed from its config alone.

Sizes are in bytes; GB = 1e9 bytes, GiB = 2**30 bytes.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from gptfast.checkpoint.shapes import list_block_shapes, list_tensor_shapes
from gptfast.config import ModelConfig
from gptfast.errors import UserError

_UNIT_BYTES = {"gib": 2**30, "gb": 10**9, "mib": 2**20, "mb": 10**6, "bytes": 1}
_LARGEST_SIZE = 1e15  # of any unit: more than any machine has, and an int of 400 digits is no float
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)", re.IGNORECASE)


class InspectionError(UserError):
    """A size or a precision that cannot be read."""


@dataclass(frozen=True)
class Component:
    """One weight of the model: its shape, (out, in) for a matrix, and whether each block has one."""

    name: str
    shape: tuple[int, ...]
    in_block: bool = False

    @property
    def count(self) -> int:
        """Parameters in one copy; 0 for a weight that is tied to another one."""
        return math.prod(self.shape) if self.shape else 0


@dataclass(frozen=True)
class ParameterAccount:
    """The parameters of a model per component, in the names of Meta's reference."""

    components: tuple[Component, ...]
    n_layers: int

    def count_all(self, component: Component) -> int:
        """Parameters of `component` in the whole model."""
        return component.count * (self.n_layers if component.in_block else 1)

    def count_in_block(self, prefix: str = "") -> int:
        """Parameters in one block, of the components whose names begin with `prefix`."""
        return sum(part.count for part in self.components if part.in_block and part.name.startswith(prefix))

    @property
    def total(self) -> int:
        """All parameters; a tied output layer counts once."""
        return sum(self.count_all(component) for component in self.components)


@dataclass(frozen=True)
class Precision:
    """How weights are stored: `bits` per weight in a quantized matrix, the rest in `dense_bytes`.

    Quantized are the blocks' projections and, always as `HEAD`, the output layer, which a tied embedding is too. Each
    group of `group_size` weights of a row (None: the whole row) has a scale of `scale_bytes`. Norms, biases and an
    embedding that is not the output layer have `dense_bytes` per element.
    """

    name: str
    dense_bytes: int
    bits: int | None = None
    group_size: int | None = None
    scale_bytes: int = 0


HEAD = Precision("int8 per channel", dense_bytes=2, bits=8, scale_bytes=2)
PRECISIONS = (
    Precision("float32", dense_bytes=4),
    Precision("bfloat16", dense_bytes=2),
    Precision("fp8 per channel", dense_bytes=2, bits=8, scale_bytes=4),
    HEAD,
    Precision("int4 group 32", dense_bytes=2, bits=4, group_size=32, scale_bytes=2),
)
"""What `load` makes of weights: fp32, bf16, fp8, int8 and int4."""
KV_ELEMENT_BYTES = {"float32": 4, "fp32": 4, "bfloat16": 2, "bf16": 2, "int8": 1}
_AS_STORED = Precision("as stored", dense_bytes=2)


@dataclass(frozen=True)
class MemoryEstimate:
    """What a model takes at one precision, and the largest context that fits at batch size 1.

    `limited_by` says what ends the context: the memory, or the context the model was made for; it
    is "weights" if they leave no room for a single token, and then `max_context_tokens` is 0.
    """

    precision: str
    weight_bytes: int
    bits_per_weight: float
    kv_bytes_per_token: int
    max_context_tokens: int
    limited_by: Literal["memory", "model", "weights"]


def count_parameters(config: ModelConfig) -> ParameterAccount:
    """The parameters of every component, from the tensors that `config` implies."""
    outer = {name: shape for name, shape in list_tensor_shapes(config).items() if not name.startswith("layers.")}
    first, *last = [Component(name.removesuffix(".weight"), shape) for name, shape in outer.items()]
    block = [
        Component(name.removesuffix(".weight"), shape, in_block=True)
        for name, shape in list_block_shapes(config).items()
    ]
    if config.tie_word_embeddings:
        last.append(Component("output", ()))
    return ParameterAccount(components=(first, *block, *last), n_layers=config.n_layers)


def estimate_memory(
    config: ModelConfig, available_bytes: int, stored_bytes: int | None = None, *, kv_dtype: str = "bfloat16"
) -> list[MemoryEstimate]:
    """What the model takes at every precision, and which context `available_bytes` can hold.

    Counted are the weights and the KV cache; activations and the process itself are not.
    `stored_bytes`, the size of a checkpoint's weights as they lie on disk, adds a first row.
    Raises InspectionError for a `kv_dtype` that is not in `KV_ELEMENT_BYTES`.
    """
    if kv_dtype not in KV_ELEMENT_BYTES:
        raise InspectionError(f"kv-dtype {kv_dtype!r} is not supported; use {', '.join(KV_ELEMENT_BYTES)}")
    kv_bytes = config.get_kv_bytes_per_token(KV_ELEMENT_BYTES[kv_dtype], has_scales=kv_dtype == "int8")
    account = count_parameters(config)
    sizes = [(precision, _compute_weight_bytes(account, precision)) for precision in PRECISIONS]
    if stored_bytes is not None:
        sizes.insert(0, (_AS_STORED, stored_bytes))
    return [
        _estimate_precision(config, account.total, precision, weight_bytes, kv_bytes, available_bytes)
        for precision, weight_bytes in sizes
    ]


def parse_size(text: str) -> int:
    """Bytes that a size such as "24GiB" or "1.5 GB" names; raises InspectionError."""
    match = _SIZE.fullmatch(text.strip())
    unit_bytes = _UNIT_BYTES.get(match[2].lower()) if match else None
    if match is None or unit_bytes is None or not 0 < float(match[1]) < _LARGEST_SIZE:
        raise InspectionError(
            f"{text!r} is not a size; write a positive number with GiB, GB, MiB, MB or bytes, such as 24GiB"
        )
    return int(float(match[1]) * unit_bytes)


def _compute_weight_bytes(account: ParameterAccount, precision: Precision) -> int:
    is_tied = any(component.name == "output" and not component.shape for component in account.components)
    total = 0
    for component in account.components:
        is_head = component.name == ("tok_embeddings" if is_tied else "output")
        is_dense = precision.bits is None or len(component.shape) != 2
        if is_dense or (component.name == "tok_embeddings" and not is_head):
            total += account.count_all(component) * precision.dense_bytes
        else:
            copies = account.n_layers if component.in_block else 1
            total += copies * _compute_quantized_bytes(component, HEAD if is_head else precision)
    return total


def _compute_quantized_bytes(component: Component, precision: Precision) -> int:
    assert precision.bits is not None
    rows, columns = component.shape
    groups = math.ceil(columns / (precision.group_size or columns))
    return rows * (math.ceil(columns * precision.bits / 8) + groups * precision.scale_bytes)


def _estimate_precision(
    config: ModelConfig,
    n_parameters: int,
    precision: Precision,
    weight_bytes: int,
    kv_bytes: int,
    available_bytes: int,
) -> MemoryEstimate:
    fitting_tokens = max(0, (available_bytes - weight_bytes) // kv_bytes)
    limited_by: Literal["memory", "model", "weights"] = "memory"
    if fitting_tokens == 0:
        limited_by = "weights"
    elif fitting_tokens >= config.max_seq_len:
        limited_by = "model"
    return MemoryEstimate(
        precision=precision.name,
        weight_bytes=weight_bytes,
        bits_per_weight=8 * weight_bytes / n_parameters,
        kv_bytes_per_token=kv_bytes,
        max_context_tokens=min(fitting_tokens, config.max_seq_len),
        limited_by=limited_by,
    )
