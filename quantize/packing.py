"""The tensors that compressed-tensors stores for a matrix: in its format `pack-quantized`, floats in `float-quantized`.

Shapes: N out_features, K in_features, G groups. Integers are packed into int32, the first into the lowest bits, as
unsigned numbers: a signed code or zero is raised by 2**(bits - 1). Floats stand as they are. Source:
`PackedQuantizationCompressor` and `FloatQuantizationCompressor` of the compressed-tensors library, 0.20.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gptfast.quantization import QuantizedWeight, WeightScheme


def pack(weight: QuantizedWeight, scheme: WeightScheme) -> dict[str, Tensor]:
    """The stored tensors by the ends of their names, which stand where `weight` would.

    The scales of symmetric integers are stored as bfloat16, whose values they have. Those of an asymmetric scheme and
    of floats stay float32, as transformers multiplies in the dtype of the scale and would round the product.
    """
    if scheme.is_float:
        return {"weight": weight.codes, "weight_scale": weight.scales}
    offset = 0 if weight.bits == 4 and weight.zeros is not None else 1 << (weight.bits - 1)
    tensors = {
        "weight_packed": pack_rows(weight.codes.view(torch.uint8) + offset, weight.bits),
        "weight_scale": weight.scales.bfloat16() if scheme.symmetric else weight.scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if weight.zeros is not None:
        zeros = weight.zeros.view(torch.uint8) + offset
        tensors["weight_zero_point"] = pack_rows(zeros.t().contiguous(), weight.bits).t().contiguous()
    return tensors


def pack_rows(values: Tensor, bits: int) -> Tensor:
    """Pack (rows, columns) uint8 below 2**bits into (rows, ceil(columns * bits / 32)) int32; `bits` is 4 or 8."""
    missing = -values.shape[1] % (32 // bits)
    if missing:
        values = nn.functional.pad(values, (0, missing))
    if bits == 4:
        values = values[:, 0::2] | values[:, 1::2] << 4
    return values.flatten().view(torch.int32).view(len(values), -1)


def compute_packed_bytes(shape: tuple[int, int], scheme: WeightScheme) -> dict[str, int]:
    """The bytes of each of `pack`'s tensors for a matrix of that shape, found without making one."""
    rows, columns = shape
    groups = columns // scheme.get_group_size(columns)
    weight = QuantizedWeight(
        codes=torch.empty(shape, dtype=scheme.dtype, device="meta"),
        scales=torch.empty((rows, groups), device="meta"),
        bits=scheme.bits,
        zeros=None if scheme.symmetric else torch.empty((rows, groups), dtype=torch.int8, device="meta"),
    )
    return {name: tensor.nbytes for name, tensor in pack(weight, scheme).items()}
