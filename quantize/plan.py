"""Which tensor is stored how: decided from shapes and types alone, before anything is read or written."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from gptfast.checkpoint.base import DENSE_DTYPES, Checkpoint
from gptfast.checkpoint.compressed_tensors import PATTERN_PREFIX, matches_target
from gptfast.checkpoint.shapes import list_tensor_shapes
from gptfast.errors import UserError
from gptfast.loading import EMBEDDING, HEAD, check_names
from gptfast.model import describe_dtype
from gptfast.quantization import FLOAT8, WeightScheme
from quantize.names import get_hf_module, get_hf_name, get_module
from quantize.packing import compute_packed_bytes

GROUP_SIZES = (128, 64, 32)
"""Inputs that may share a scale, those that kernels commonly have (vLLM's and ours)."""
STORED_DTYPES = {"F64": torch.float64} | DENSE_DTYPES
KEPT_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
KEPT_PRECISIONS = ("int8", "fp8", *KEPT_DTYPES)
HEAD_NOTE = (
    "as transformers opens asymmetric files only where all layers are rounded alike; --keep lm_head=int8 rounds it"
)


@dataclass(frozen=True)
class KeepRule:
    """Layers that are to be stored more precisely than the rest.

    Attributes:
        target: the name of a module, ours or Hugging Face's, or `re:` and a pattern that the beginning of such a name
            must match.
        precision: one of `KEPT_PRECISIONS`; int8 and fp8 have a scale per output channel.
    """

    target: str
    precision: str

    def matches(self, name: str) -> bool:
        """Whether the rule is for the tensor with this canonical name."""
        return any(matches_target(self.target, module) for module in (get_module(name), get_hf_module(name)))


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor of the file to be written.

    Attributes:
        name: its canonical name.
        source: the checkpoint's tensor that it is made of.
        shape: of the matrix or vector.
        scheme: how it is rounded; None if it stays dense.
        dtype: of a dense tensor.
        note: why it is not stored as asked, or not rounded; None where nothing needs saying.
        is_skipped: whether it stays dense though it was to be rounded.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    scheme: WeightScheme | None
    dtype: torch.dtype
    note: str | None = None
    is_skipped: bool = False

    @property
    def is_layer(self) -> bool:
        """Whether it is the matrix of a linear layer."""
        return len(self.shape) == 2 and self.name != EMBEDDING

    @property
    def precision(self) -> str:
        """How it is stored, in words."""
        return describe_dtype(self.dtype) if self.scheme is None else self.scheme.describe()

    def compute_stored_bytes(self) -> dict[str, int]:
        """The bytes of each tensor that the file holds for it, by Hugging Face's names."""
        if self.scheme is None:
            return {get_hf_name(self.name): torch.empty(self.shape, dtype=self.dtype, device="meta").nbytes}
        rows, columns = self.shape
        packed = compute_packed_bytes((rows, columns), self.scheme)
        return {f"{get_hf_module(self.name)}.{end}": size for end, size in packed.items()}


@dataclass(frozen=True)
class Plan:
    """What is to be written.

    Attributes:
        tensors: everything, in the order of the model.
        source_types: how the source stores the matrices that are rounded, and how many of them each way.
        tied_head: the head that stays the embedding's matrix, so is none of the tensors; None if it has its own.
    """

    tensors: tuple[PlannedTensor, ...]
    source_types: Counter[str]
    tied_head: PlannedTensor | None = None

    @property
    def dense(self) -> list[PlannedTensor]:
        """The tensors that are written as they are."""
        return [tensor for tensor in self.tensors if tensor.scheme is None]

    @property
    def rounded(self) -> list[PlannedTensor]:
        """The matrices that are rounded."""
        return [tensor for tensor in self.tensors if tensor.scheme is not None]

    @property
    def layers(self) -> list[PlannedTensor]:
        """The matrices of linear layers, rounded or not, a tied head among them."""
        own = [tensor for tensor in self.tensors if tensor.is_layer]
        return own if self.tied_head is None else [*own, self.tied_head]

    @property
    def skipped(self) -> list[PlannedTensor]:
        """The matrices that were to be rounded and cannot be."""
        return [tensor for tensor in self.layers if tensor.is_skipped]

    def compute_stored_bytes(self) -> dict[str, int]:
        """The bytes of each tensor of the file; first what is dense, as it takes no time."""
        tensors = [*self.dense, *self.rounded]
        return {name: size for tensor in tensors for name, size in tensor.compute_stored_bytes().items()}

    def list_warnings(self) -> list[str]:
        """What a user should know before the work begins, a line each."""
        lines = []
        rounded = {kind: count for kind, count in self.source_types.items() if kind not in STORED_DTYPES}
        if rounded:
            kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(rounded.items()))
            lines.append(
                f"the source is already rounded ({kinds}): rounding it again loses accuracy that a checkpoint in "
                "16 bits would keep"
            )
        schemes = {tensor.scheme for tensor in self.rounded}
        if any(scheme is not None and not scheme.symmetric for scheme in schemes) and len(schemes) > 1:
            lines.append(
                "transformers will not open the result, as it opens asymmetric files only where all layers are "
                "rounded alike; gptfast does"
            )
        if self.skipped:
            names = ", ".join(get_module(tensor.name) for tensor in self.skipped[:3])
            more = ", ..." if len(self.skipped) > 3 else ""
            lines.append(f"{len(self.skipped)} layers stay dense, as no group size divides them: {names}{more}")
        return lines


def parse_keep_rule(text: str) -> KeepRule:
    """Read `TARGET=PRECISION`; raises UserError if it is not of that form."""
    target, separator, precision = text.rpartition("=")
    if not separator or not target or precision not in KEPT_PRECISIONS:
        raise UserError(f"keep is {text!r}; write it as TARGET={'|'.join(KEPT_PRECISIONS)}, such as lm_head=int8")
    if target.startswith(PATTERN_PREFIX):
        try:
            re.compile(target.removeprefix(PATTERN_PREFIX))
        except re.error as error:
            raise UserError(f"keep has the pattern {target!r}, which cannot be read ({error}); correct it") from error
    return KeepRule(target, precision)


def list_default_rules(scheme: WeightScheme) -> list[KeepRule]:
    """With 4 bits or floats the head is rounded to int8: it is the layer whose error nothing after it evens out.

    Not beside an asymmetric scheme: transformers opens such files only where all layers are rounded alike.
    """
    return [KeepRule("lm_head", "int8")] if (scheme.bits == 4 and scheme.symmetric) or scheme.is_float else []


def make_plan(checkpoint: Checkpoint, scheme: WeightScheme, rules: Sequence[KeepRule]) -> Plan:
    """Decide how every tensor of the checkpoint is stored.

    The matrices of the blocks get `scheme` unless a rule is for them; of several rules the last counts. The head gets
    what a rule says, else `scheme` if that is symmetric, else it stays dense; one that is tied to the embedding and
    rounded gets a tensor of its own. Where `scheme`'s group does not divide a matrix's inputs, the next smaller
    of `GROUP_SIZES` that does is taken, or the matrix stays dense.

    What stays dense keeps the dtype that the source stores it in. Where that is none, as in the blocks of a GGUF file,
    it becomes bfloat16: llama.cpp stores vectors in float32 and only matrices in blocks.

    Raises UserError for a rule that is for no layer, and CheckpointError if tensors are missing or unknown.
    """
    config = checkpoint.config
    shapes = list_tensor_shapes(config)
    aliases = check_names(checkpoint, set(shapes))
    sources = {name: aliases.get(name, name) for name in shapes}
    if config.tie_word_embeddings:
        sources[HEAD], shapes[HEAD] = sources[EMBEDDING], shapes[EMBEDDING]
    layers = [name for name, shape in shapes.items() if len(shape) == 2 and name != EMBEDDING]
    check_rules(rules, layers)
    tensors = []
    tied_head = None
    source_types: Counter[str] = Counter()
    for name, shape in shapes.items():
        kind = checkpoint.describe_type(sources[name])
        dense = PlannedTensor(name, sources[name], shape, None, STORED_DTYPES.get(kind, torch.bfloat16))
        planned = plan_layer(dense, scheme, rules) if name in layers else dense
        if name == HEAD and config.tie_word_embeddings and planned.scheme is None and planned.dtype == dense.dtype:
            tied_head = planned
            continue
        tensors.append(planned)
        if planned.scheme is not None:
            source_types[kind] += 1
    return Plan(tuple(tensors), source_types, tied_head)


def check_rules(rules: Sequence[KeepRule], layers: Sequence[str]) -> None:
    """Raise UserError for a rule that is for none of the layers, which are given by canonical names."""
    for rule in rules:
        if not any(rule.matches(name) for name in layers):
            raise UserError(
                f"keep names {rule.target!r}, which is no linear layer of this model; "
                f"write lm_head, {get_hf_module(layers[0])} or a pattern such as 're:.*down_proj'"
            )


def plan_layer(dense: PlannedTensor, scheme: WeightScheme, rules: Sequence[KeepRule]) -> PlannedTensor:
    """How one matrix is stored, which would be `dense` if it were left alone."""
    matching = [rule for rule in rules if rule.matches(dense.name)]
    if matching and matching[-1].precision in KEPT_DTYPES:
        return replace(dense, dtype=KEPT_DTYPES[matching[-1].precision])
    if not matching and dense.name == HEAD and not scheme.symmetric:
        return replace(dense, note=HEAD_NOTE)
    asked = scheme
    if matching:
        asked = FLOAT8 if matching[-1].precision == "fp8" else WeightScheme(8, None, scheme.symmetric)
    size, columns = asked.group_size, dense.shape[1]
    if size is None or columns % size == 0:
        return replace(dense, scheme=asked)
    smaller = next((group for group in GROUP_SIZES if group < size and columns % group == 0), None)
    if smaller is None:
        note = f"no group of {size} or fewer inputs, down to {GROUP_SIZES[-1]}, divides its {columns}"
        return replace(dense, note=note, is_skipped=True)
    note = f"groups of {smaller}, as {size} does not divide its {columns} inputs"
    return replace(dense, scheme=replace(asked, group_size=smaller), note=note)
