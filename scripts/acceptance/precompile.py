"""Kernels that the sections launch, compiled before that in several processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gptfast.kernels.cuda.configurations import Gpu
from gptfast.kernels.cuda.precompilation import Call, compile_call, open_pool


@dataclass(frozen=True)
class Attention:
    """Attention of so many tokens, in bfloat16 with that cache."""

    query_heads: int
    kv_heads: int
    head_dim: int
    tokens: int
    cache_dtype: torch.dtype

    def make(self, gpu: Gpu | None) -> None:
        """See `Call.make`; the length of the cache changes nothing of what is compiled."""
        from gptfast.kernels.cuda import attention

        q = torch.empty(1, self.tokens, self.query_heads, self.head_dim, dtype=torch.bfloat16)
        k, v = (torch.empty(1, self.kv_heads, 1024, self.head_dim, dtype=self.cache_dtype) for _ in range(2))
        scales = torch.empty(1, self.kv_heads, 1024, 1) if self.cache_dtype == torch.int8 else None
        input_pos = torch.zeros(self.tokens, dtype=torch.int64)
        attention.attend(q, k, v, input_pos, k_scales=scales, v_scales=scales)


def compile_all(calls: Sequence[Call], gpu: Gpu) -> dict[str, str]:
    """Compile the kernels of all; what went wrong, by call."""
    with open_pool() as pool:
        futures = {call: pool.submit(compile_call, call, gpu) for call in dict.fromkeys(calls)}
        results = {str(call): future.result() for call, future in futures.items()}
    return {call: error for call, error in results.items() if error is not None}
