"""From logits to the next token, on the device that holds them and without a word to the host.

Noise is counter-based: a pure function of (seed, row, position, token id). So the same seed gives the same text
whatever was computed before, in which batch, and however a step was executed.

Shapes: B batch, V vocabulary.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from gptfast.config import SamplingConfig

GOLDEN_GAMMA = -0x61C8864680B583EB  # 2**64 / golden ratio, as a signed 64-bit integer


@contextlib.contextmanager
def on_one_thread() -> Iterator[None]:
    """Within, torch's own operators run on the calling thread.

    They are small here, and OpenMP's threads would spin for milliseconds after each on the cores that the CPU kernels'
    own threads need for the next step.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@on_one_thread()
def sample(
    logits: Tensor,
    sampling: SamplingConfig,
    position: Tensor,
    *,
    rows: Tensor | None = None,
    seen: Tensor | None = None,
) -> Tensor:
    """Choose one token per row; the lowest id among equals.

    Args:
        logits: (B, V) of any floating dtype.
        position: (1,) int64, where the token will stand.
        rows: (B,) int64, which sample each row is; 0 to B-1 if None.
        seen: (B, V) bool, the tokens that the repetition penalty is for.

    Returns:
        (B,) int64 token ids.
    """
    logits = adjust_logits(logits, sampling, seen)
    if sampling.temperature == 0:
        return logits.argmax(dim=-1)
    if rows is None:
        rows = torch.arange(logits.shape[0], device=logits.device)
    # The Gumbel-max trick (Gumbel 1954): argmax of logits + noise is distributed as softmax of logits.
    return (logits + draw_gumbel(sampling.seed, rows, position, logits.shape[-1])).argmax(dim=-1)


def adjust_logits(logits: Tensor, sampling: SamplingConfig, seen: Tensor | None = None) -> Tensor:
    """Apply penalty, temperature and filters to (B, V) logits; (B, V) float32, -inf for what is left out.

    The largest logit always stays, and a filter never parts equal logits: all that equal the last one kept stay.
    """
    logits = logits.float()
    if seen is not None and sampling.repetition_penalty != 1:
        penalty = sampling.repetition_penalty
        logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    if sampling.temperature == 0:
        return logits
    # Without the maximum a temperature near zero would overflow.
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / sampling.temperature
    if sampling.top_k is not None and 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    if sampling.top_p < 1:
        probabilities = logits.softmax(dim=-1)
        least = find_nucleus_threshold(probabilities, sampling.top_p)
        logits = logits.masked_fill(probabilities < least, -math.inf)
    if sampling.min_p > 0:
        least = logits.amax(dim=-1, keepdim=True) + math.log(sampling.min_p)
        logits = logits.masked_fill(logits < least, -math.inf)
    return logits


def find_nucleus_threshold(probabilities: Tensor, top_p: float) -> Tensor:
    """The largest of the (B, V) probabilities, (B, 1), that leaves at least `top_p` at or above it.

    What is at or above it is the nucleus of Holtzman et al. 2020. It is found by bisection over the bits of the
    floats, which order non-negative numbers: sorting 49,152 of them takes 6 ms on a CPU, longer than a decode step
    of a small model, and 31 sums take 1 ms.
    """
    bits = probabilities.view(torch.int32)
    high = bits.amax(dim=-1, keepdim=True)
    low = torch.zeros_like(high)
    for _ in range(31):
        middle = low + (high - low + 1) // 2
        is_enough = probabilities.where(bits >= middle, 0).sum(dim=-1, keepdim=True) >= top_p
        low, high = low.where(~is_enough, middle), high.where(is_enough, middle - 1)
    return low.view(torch.float32)


def draw_gumbel(seed: int, rows: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise (B, V) float32 for the samples `rows` (B,) at `position` (1,)."""
    stream = mix_bits(mix_bits(torch.full_like(rows, seed) ^ mix_bits(rows)) + position)
    counter = torch.arange(1, vocab_size + 1, device=rows.device) * GOLDEN_GAMMA
    bits = mix_bits(stream[:, None] + counter)
    # 40 bits as a float keep their relative precision near 0, where the largest noise comes from.
    uniform = shift_right(bits, 24).float() * 2.0**-40 + 2.0**-42
    exponential = -torch.log1p(-uniform.clamp(max=1 - 2.0**-24))
    return -exponential.log()


def mix_bits(x: Tensor) -> Tensor:
    """A bijection of int64 that scatters its bits: the finalizer of SplitMix64 (Steele et al. 2014)."""
    x = (x ^ shift_right(x, 30)) * -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
    x = (x ^ shift_right(x, 27)) * -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
    return x ^ shift_right(x, 31)


def shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64, which torch shifts arithmetically."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
