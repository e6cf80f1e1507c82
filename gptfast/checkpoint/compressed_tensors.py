"""The `quantization_config` that the compressed-tensors library writes: which layers are stored in which way."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptfast.checkpoint.fields import Fields
from gptfast.errors import CheckpointError
from gptfast.quantization import FLOAT8, WeightScheme

QUANT_METHOD = "compressed-tensors"
CONFIG_KEYS = ("quantization_config", "compression_config")
"""Where config.json has it; the second is how early versions of the library call it."""
PACKED_FORMAT = "pack-quantized"
FLOAT_FORMAT = "float-quantized"
FORMATS = {
    "int": (PACKED_FORMAT, "int-quantized", "naive-quantized"),
    "float": (FLOAT_FORMAT, "naive-quantized"),
}
"""By the type of a weight; of integers, all but the first store each code in a byte."""
PATTERN_PREFIX = "re:"
QUANTIZED_PARTS = ("weight_packed", "weight_shape", "weight_scale", "weight_zero_point", "weight_g_idx", "input_scale")
"""The tensors that only a quantized layer has, by the last part of their names."""
ADVICE = "use a checkpoint whose weights alone are quantized, to int4, int8 or fp8"


@dataclass(frozen=True)
class StoredScheme:
    """How the layers of one group are stored.

    Attributes:
        rounding: bits, groups and symmetry.
        is_packed: whether codes lie in int32 words; else each is a byte.
        has_one_scale: whether the whole matrix has one scale, and one zero, instead of one for every row.
        is_reordered: whether a tensor tells the group of every column.
        rounds_inputs: whether activations were meant to be rounded too, which they are not here.
    """

    rounding: WeightScheme
    is_packed: bool
    has_one_scale: bool = False
    is_reordered: bool = False
    rounds_inputs: bool = False

    def list_parts(self) -> set[str]:
        """The tensors that a layer must have, by the last part of their names."""
        codes = {"weight_packed", "weight_shape"} if self.is_packed else {"weight"}
        zeros = set() if self.rounding.symmetric else {"weight_zero_point"}
        order = {"weight_g_idx"} if self.is_reordered else set()
        return codes | {"weight_scale"} | zeros | order

    def list_optional_parts(self) -> set[str]:
        """Those that it may have."""
        return {"weight_g_idx", "input_scale"} if self.rounds_inputs else {"weight_g_idx"}


@dataclass(frozen=True)
class Compression:
    """Which layers are stored how: `schemes` by target, in the order of their precedence, and `ignored` targets.

    A target is the name of a module, a pattern of names after `re:`, or a class.
    """

    schemes: Mapping[str, StoredScheme]
    ignored: Collection[str]

    def find_scheme(self, module: str) -> StoredScheme | None:
        """The scheme of the module that transformers calls by that name; None if its weight is stored dense."""
        if module.endswith("norm"):
            return None
        kind = "Embedding" if module.endswith("embed_tokens") else "Linear"
        if any(target == kind or matches_target(target, module) for target in self.ignored):
            return None
        named = (scheme for target, scheme in self.schemes.items() if matches_target(target, module))
        return next(named, self.schemes.get(kind))


def parse_compression(raw: Mapping[str, Any], source: str) -> Compression | None:
    """The quantization that a `config.json` describes, or None; `source` names the file in errors.

    Raises CheckpointError for another method than that of compressed-tensors, and for what is not computed:
    activations of integers, floats of other than 8 bits, sparse or rotated weights. Activations that were meant to be
    floats of 8 bits are no reason to refuse the weights: left as they are, they lose nothing.
    """
    config = Fields(raw, source)
    fields = next(filter(None, map(config.get_fields, CONFIG_KEYS)), None)
    if fields is None:
        return None
    method = fields.raw.get("quant_method")
    if method != QUANT_METHOD:
        raise CheckpointError(
            f"{fields.source} has quant_method = {method!r:.80}, which is not supported; "
            f"use a checkpoint that is not quantized, one of {QUANT_METHOD} or a GGUF file"
        )
    _refuse_unsupported(fields)
    groups = fields.get_fields("config_groups")
    if groups is None:
        if fields.raw.get("config_groups") is None:
            raise fields.refuse("config_groups", "an object of groups")
        return Compression({}, [])  # of no groups: every layer is stored dense
    schemes: dict[str, StoredScheme] = {}
    for name in groups.raw:
        group = groups.get_fields(name)
        if group is None:
            raise groups.refuse(name, "an object")
        schemes |= dict.fromkeys(_get_targets(group, "targets"), _parse_group(group, fields.raw.get("format")))
    # The library's order: exact names, then patterns, each in alphabetical order.
    targets = sorted(schemes, key=lambda target: (target.startswith(PATTERN_PREFIX), target))
    return Compression({target: schemes[target] for target in targets}, _get_targets(fields, "ignore"))


def find_compressed(names: Collection[str], compression: Compression, path: Path) -> dict[str, StoredScheme]:
    """The scheme of every quantized module among the `names` of the stored tensors.

    Raises CheckpointError for a tensor that a module lacks, or has although the config does not say so.
    """
    parts: dict[str, set[str]] = defaultdict(set)
    for name in names:
        module, _, part = name.rpartition(".")
        if part == "weight" or part in QUANTIZED_PARTS:
            parts[module].add(part)
    found: dict[str, StoredScheme] = {}
    for module, own in parts.items():
        scheme = compression.find_scheme(module)
        _check_parts(module, own, scheme, path)
        if scheme is not None:
            found[module] = scheme
    return found


def matches_target(target: str, module: str) -> bool:
    """Whether the target, a module's name or a pattern of how such names begin, is for the module."""
    if target.startswith(PATTERN_PREFIX):
        return re.match(target.removeprefix(PATTERN_PREFIX), module) is not None
    return target == module


def _check_parts(module: str, own: set[str], scheme: StoredScheme | None, path: Path) -> None:
    needed = {"weight"} if scheme is None else scheme.list_parts()
    optional = set() if scheme is None else scheme.list_optional_parts()
    if unknown := own - needed - optional:
        raise CheckpointError(
            f"{path} has tensor {module}.{min(unknown)}, which its quantization_config does not account for; "
            "the weights and the config are not of the same model"
        )
    if lacking := needed - own:
        raise CheckpointError(
            f"{path} lacks tensor {module}.{min(lacking)}, which its quantization_config asks for; download it again"
        )


def _refuse_unsupported(fields: Fields) -> None:
    status = fields.raw.get("quantization_status")
    if status not in (None, "compressed"):
        raise CheckpointError(
            f"{fields.source} has quantization_status = {status!r:.80}, so its weights are not stored rounded; "
            "save the model again with save_compressed=True"
        )
    for key in ("kv_cache_scheme", "moe_sparsity_config"):
        if fields.raw.get(key) is not None:
            raise _refuse(fields, key)
    sparsity = fields.get_fields("sparsity_config")
    if sparsity is not None and sparsity.raw.get("format") not in (None, "dense"):
        raise _refuse(sparsity, "format")
    transform = fields.get_fields("transform_config")
    if transform is not None and any(transform.raw.values()):
        raise _refuse(fields, "transform_config")


def _parse_group(group: Fields, common_format: Any) -> StoredScheme:
    stored_format = group.raw.get("format") or common_format
    if not any(stored_format in formats for formats in FORMATS.values()):
        raise CheckpointError(
            f"{group.source} are of the format {stored_format!r:.80}, which is not supported; {ADVICE}"
        )
    weights = group.get_fields("weights")
    if weights is None:
        raise group.refuse("weights", "an object")
    kind = weights.raw.get("type", "int")
    if not any(kind == name and stored_format in formats for name, formats in FORMATS.items()):
        raise weights.refuse("type", f"one of the format {stored_format}")
    is_float, is_packed = kind == "float", stored_format == PACKED_FORMAT
    if group.raw.get("output_activations") is not None:
        raise _refuse(group, "output_activations")
    rounds_inputs = group.raw.get("input_activations") is not None
    if rounds_inputs and not _are_floats_of_8_bits(group.get_fields("input_activations")):
        raise _refuse(group, "input_activations")
    bits = weights.get_size("num_bits")
    if bits not in ((4, 8) if is_packed else (8,)):
        raise _refuse(weights, "num_bits")
    strategy = weights.raw.get("strategy") or _infer_strategy(weights)
    if strategy not in (("channel", "tensor") if is_float else ("group", "channel", "tensor")):
        raise _refuse(weights, "strategy")
    is_symmetric = weights.get_flag("symmetric", True)
    if is_float and not is_symmetric:
        raise _refuse(weights, "symmetric")
    group_size = weights.get_size("group_size") if strategy == "group" else None
    return StoredScheme(
        rounding=FLOAT8 if is_float else WeightScheme(bits, group_size, is_symmetric),
        is_packed=is_packed,
        has_one_scale=strategy == "tensor",
        is_reordered=weights.raw.get("actorder") in ("group", "dynamic", True),
        rounds_inputs=rounds_inputs,
    )


def _are_floats_of_8_bits(activations: Fields | None) -> bool:
    return activations is not None and (activations.raw.get("type"), activations.raw.get("num_bits")) == ("float", 8)


def _infer_strategy(weights: Fields) -> str:
    group_size = weights.raw.get("group_size")
    return "tensor" if group_size is None else "channel" if group_size == -1 else "group"


def _get_targets(fields: Fields, key: str) -> list[str]:
    targets = fields.raw.get(key) or []
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise fields.refuse(key, "a list of names")
    for target in targets:
        try:
            matches_target(target, "")
        except (re.error, OverflowError, RecursionError) as error:
            raise fields.refuse(key, f"a list of names and patterns ({target!r:.80} is none: {error})") from error
    return targets


def _refuse(fields: Fields, key: str) -> CheckpointError:
    return CheckpointError(f"{fields.source} has {key} = {fields.raw[key]!r:.80}, which is not supported; {ADVICE}")
