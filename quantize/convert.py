"""From an open checkpoint to a written one, one matrix at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from gptfast.checkpoint.base import Checkpoint, check_finite, check_tensor
from gptfast.checkpoint.compressed_tensors import CONFIG_KEYS
from gptfast.checkpoint.hf import HuggingFaceCheckpoint
from gptfast.errors import UserError
from gptfast.files import read_json
from gptfast.quantization import QuantizedWeight, WeightScheme, join_rows
from gptfast.rounding import round_to_nearest
from quantize.calibration import list_calibration_warnings
from quantize.metadata import make_config, write_companions, write_json
from quantize.names import get_hf_module, get_hf_name
from quantize.packing import pack
from quantize.plan import Plan, PlannedTensor
from quantize.report import LayerReport, Report
from quantize.writer import ShardWriter, check_disk_space, resolve_output, write_aside

Mode = Literal["fp8", "int8", "int4", "int4-hqq", "int4-gptq"]
OnLayer = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """How matrices are rounded.

    Attributes:
        mode: fp8, int8 and int4 round to nearest, with a search for the range of every group at 4 bits.
        scheme: of the layers that no rule is for.
        calibration_ids: (B, S) int64, the text that int4-gptq rounds by; None for the other modes.
    """

    mode: Mode
    scheme: WeightScheme
    calibration_ids: Tensor | None = None


def refuse_compressed(checkpoint: Checkpoint) -> None:
    """Raise UserError for a checkpoint that is in compressed-tensors form already."""
    if isinstance(checkpoint, HuggingFaceCheckpoint):
        raw = read_json(checkpoint.path / "config.json")
        if any(raw.get(key) for key in CONFIG_KEYS):
            raise UserError(
                f"{checkpoint.path} is a quantized compressed-tensors checkpoint already; "
                "give the checkpoint that it was made from"
            )


def list_warnings(plan: Plan, settings: Settings) -> list[str]:
    """Those of the plan and of the calibration text, a line each."""
    ids = settings.calibration_ids
    return plan.list_warnings() + ([] if ids is None else list_calibration_warnings(ids))


def convert(checkpoint: Checkpoint, output: Path, plan: Plan, settings: Settings, on_layer: OnLayer) -> Report:
    """Write the checkpoint as planned to the new directory `output`.

    Matrices are read, rounded, packed and written one after the other. Beside what the file maps, memory holds the
    shard that is being filled and at most twice what the largest tensor takes in 16 bits, also where the source's
    blocks have to be expanded to float32; with GPTQ what `iterate_gptq` names too.

    `on_layer` is told the name of each matrix that is done. Raises UserError if the plan rounds nothing, if `output`
    cannot be written or holds anything, if the disk has no room, if a weight is not finite, or if the model cannot be
    described in Hugging Face's words. Whatever is raised, `output` is then as it was.
    """
    start = time.perf_counter()
    if not plan.rounded:
        raise UserError(
            "nothing is left to round, every layer would stay dense; keep fewer layers, or give a --group-size that "
            "divides their inputs"
        )
    target = resolve_output(output)
    sizes = plan.compute_stored_bytes()
    check_disk_space(target, sum(sizes.values()))
    config = make_config(checkpoint, plan)
    errors: dict[str, float] = {}
    with torch.inference_mode(), write_aside(target) as partial:
        writer = ShardWriter(partial, sizes)
        for tensor in plan.dense:
            writer.add(get_hf_name(tensor.name), read_dense(checkpoint, tensor))
        for tensor, weight in round_matrices(checkpoint, plan, settings):
            errors[tensor.name] = measure_error(iterate_matrix(checkpoint, tensor), weight)
            write_matrix(writer, tensor, weight)
            del weight  # else it would stand beside the next one
            on_layer(get_hf_module(tensor.name))
        writer.finish()
        write_companions(checkpoint, partial)
        # Last, as a directory without it is not taken for a checkpoint.
        write_json(partial / "config.json", config)
    return Report(
        source=str(checkpoint.path),
        output=str(output),
        mode=settings.mode,
        precision=settings.scheme.describe(),
        source_bytes=checkpoint.stored_bytes,
        stored_bytes=sum(sizes.values()),
        stored_weights=sum(math.prod(tensor.shape) for tensor in plan.tensors),
        duration_s=time.perf_counter() - start,
        warnings=tuple(list_warnings(plan, settings)),
        layers=report_layers(plan, errors),
    )


def report_layers(plan: Plan, errors: dict[str, float]) -> tuple[LayerReport, ...]:
    """The linear layers in the order of the model, with the relative error of each that was rounded."""
    return tuple(
        LayerReport(
            name=tensor.name,
            hf_name=get_hf_module(tensor.name),
            shape=tensor.shape,
            precision=tensor.precision,
            relative_error=errors.get(tensor.name, 0.0),
            note=tensor.note,
            is_skipped=tensor.is_skipped,
        )
        for tensor in plan.layers
    )


def read_dense(checkpoint: Checkpoint, tensor: PlannedTensor) -> Tensor:
    """A tensor as it is to be stored, a view of the mapped file where that is the same."""
    stored = checkpoint.view(tensor.source)
    if stored is None or stored.dtype != tensor.dtype:
        stored = torch.empty(tensor.shape, dtype=tensor.dtype)
        checkpoint.read_into(tensor.source, stored)
    check_tensor(checkpoint.path, tensor.source, stored, tensor.shape)
    check_finite(checkpoint.path, tensor.source, stored)
    return stored.contiguous()


def iterate_matrix(checkpoint: Checkpoint, tensor: PlannedTensor) -> Iterator[tuple[slice, Tensor]]:
    """A matrix to be rounded in slices of its rows, in the source's dtype or expanded to float32."""
    for part, values in checkpoint.iterate_rows(tensor.source, tensor.shape):
        check_finite(checkpoint.path, tensor.source, values)
        yield part, values


def round_matrices(
    checkpoint: Checkpoint, plan: Plan, settings: Settings
) -> Iterator[tuple[PlannedTensor, QuantizedWeight]]:
    """Round what is planned to be, in the order of the layers."""
    planned = {tensor.name: tensor for tensor in plan.rounded}
    if settings.mode == "int4-gptq":
        for tensor in plan.rounded:
            for _ in iterate_matrix(checkpoint, tensor):
                pass  # it looks at the numbers, before the hours of work
        for name, weight in iterate_gptq_blocks(checkpoint, plan, settings):
            yield planned.pop(name), weight
    for tensor in planned.values():
        parts = iterate_matrix(checkpoint, tensor)
        yield tensor, join_rows([round_rows(values, tensor, settings) for _, values in parts])


def round_rows(weight: Tensor, tensor: PlannedTensor, settings: Settings) -> QuantizedWeight:
    """Round some rows (R, K) of a matrix, each by itself."""
    assert tensor.scheme is not None
    if settings.mode == "int4-hqq" and tensor.scheme.bits == 4:
        from quantize.hqq import quantize_hqq

        return quantize_hqq(weight, tensor.scheme, name=tensor.source)
    return round_to_nearest(weight, tensor.scheme, name=tensor.source)


def iterate_gptq_blocks(
    checkpoint: Checkpoint, plan: Plan, settings: Settings
) -> Iterator[tuple[str, QuantizedWeight]]:
    """Round the matrices of the blocks by what a calibration text puts into them; the head is not among them."""
    from quantize.gptq_model import iterate_gptq

    assert settings.calibration_ids is not None
    schemes = {tensor.name: tensor.scheme for tensor in plan.rounded if tensor.name.startswith("layers.")}
    return iterate_gptq(checkpoint, schemes.get, settings.calibration_ids)


def write_matrix(writer: ShardWriter, tensor: PlannedTensor, weight: QuantizedWeight) -> None:
    """Hand the matrix over as the format stores it."""
    assert tensor.scheme is not None
    for end, packed in pack(weight, tensor.scheme).items():
        writer.add(f"{get_hf_module(tensor.name)}.{end}", packed)


def measure_error(parts: Iterable[tuple[slice, Tensor]], rounded: QuantizedWeight) -> float:
    """The Frobenius norm of what rounding changed, over that of the matrix in these parts; 0 for a matrix of zeros."""
    changed = total = 0.0
    for rows, values in parts:
        exact = values.float()
        total += float(exact.square().sum(dtype=torch.float64))
        changed += float((rounded.select_rows(rows).dequantize() - exact).square().sum(dtype=torch.float64))
    return math.sqrt(changed / total) if total else 0.0
