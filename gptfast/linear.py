"""Linear layers: they hold the weights of the model and multiply activations with them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """`nn.Linear` with the product of `multiply`."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) in, (..., out_features) out."""
        return multiply(x, self.weight, self.bias)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Activations (..., K) times the transposed weight (N, K), plus the bias (N,): (..., N), all of one dtype.

    In a step that is compiled for a CPU, the product of a single row is written out as a sum, which Inductor turns
    into one loop over the rows of the weight, accumulated in float32. The library's product of a matrix of
    3072 x 576 reads 12 GB/s and this loop 20; decoding SmolLM2-135M went from 21 to 64 tokens/s in float32 and
    from 44 to 85 in bfloat16 (2 cores of a Zen 4 at 2.6 GHz, torch 2.13, 2026-11-30).
    """
    if not (torch.compiler.is_compiling() and x.device.type == "cpu" and x.numel() == x.shape[-1]):
        return F.linear(x, weight, bias)
    # Without a layout of its own, x would be computed again for every row of the weight: 51 tokens/s, not 64.
    row = torch.as_strided(x.contiguous(), (x.shape[-1],), (1,))
    y = (row.float() * weight.float()).sum(dim=-1)
    if bias is not None:
        y = y + bias
    return y.to(x.dtype).view(*x.shape[:-1], -1)
