"""Attention over a cache a second time, in float64, as the papers write it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Cache:
    """Keys and values (B, K, L, D) as a kernel takes them; with int8, scales (B, K, L, 1)."""

    k: Tensor
    v: Tensor
    k_scales: Tensor | None = None
    v_scales: Tensor | None = None

    def expand(self) -> tuple[Tensor, Tensor]:
        """What they stand for, in float64."""
        k, v = self.k.double(), self.v.double()
        if self.k_scales is None or self.v_scales is None:
            return k, v
        return k * self.k_scales.double(), v * self.v_scales.double()


def make_cache(dtype: torch.dtype, *shape: int) -> Cache:
    """A filled cache of a shape (B, K, L, D), its values around 1."""
    if dtype != torch.int8:
        return Cache(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype))
    codes = [torch.randint(-127, 128, shape, dtype=dtype) for _ in range(2)]
    scales = [torch.rand(*shape[:-1], 1) / 64 for _ in range(2)]
    return Cache(*codes, *scales)


def attend(q: Tensor, cache: Cache, input_pos: Tensor, sliding_window: int | None = None) -> Tensor:
    """softmax(q k^T / sqrt(D)) v (Vaswani et al. 2017) of q (B, S, H, D) over the slots a token sees: (B, S, H * D)."""
    batch, _, heads, dim = q.shape
    k, v = (x[:batch].repeat_interleave(heads // x.shape[1], dim=1) for x in cache.expand())
    scores = torch.einsum("bshd,bhld->bhsl", q.double(), k) / dim**0.5
    slots = torch.arange(k.shape[2])
    visible = slots <= input_pos[:, None]
    if sliding_window is not None:
        visible &= slots > input_pos[:, None] - sliding_window
    weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
    return torch.einsum("bhsl,bhld->bshd", weights, v).flatten(2)
