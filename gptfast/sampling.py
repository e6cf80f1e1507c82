"""From logits to the next token, on the device that holds them and without a word to the host.

Noise is counter-based: a pure function of (seed, row, position, token id). So the same seed gives the same text
whatever was computed before, in which batch, and however a step was executed.

Shapes: B batch, V vocabulary.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

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


class Sampler:
    """Chooses the tokens of texts that grow together, and remembers what the repetition penalty needs."""

    def __init__(
        self,
        sampling: SamplingConfig,
        prompt_ids: Sequence[int],
        vocab_size: int,
        *,
        sample_ids: Sequence[int] = (0,),
        device: torch.device | str = "cpu",
    ) -> None:
        self._sampling = sampling
        self._rows = torch.tensor(sample_ids, device=device)
        self._seen: Tensor | None = None
        if sampling.repetition_penalty != 1:
            self._seen = torch.zeros(len(sample_ids), vocab_size, dtype=torch.bool, device=device)
            self._seen[:, torch.tensor(prompt_ids, device=device)] = True

    def choose(self, logits: Tensor, position: int) -> Tensor:
        """The next token of every text, (B,) int64 for `position`, from (B, V) logits."""
        tokens = sample(logits, self._sampling, self._get_positions(position, 1), rows=self._rows, seen=self._seen)
        self._remember(tokens[:, None])
        return tokens

    def propose(self, logits: Tensor, position: int, drafted: Tensor) -> Tensor:
        """What a text of its own would have at `position`, (1,) int64, if it went on with the n tokens `drafted` (n,).

        `logits` (1, V or less) are those of a draft model. The noise is that of `choose` there, so a draft model that
        knows the target's probabilities chooses the target's token.
        """
        seen = None if self._seen is None else self._see_each(drafted)[-1:, : logits.shape[-1]]
        return sample(logits, self._sampling, self._get_positions(position, 1), rows=self._rows, seen=seen)

    def accept(self, logits: Tensor, position: int, drafted: Tensor) -> list[int]:
        """The next tokens of a single text, one more than are accepted of the n `drafted` (n,) for `position` on.

        `logits` (n + 1, V) are the target's for `position` and those after it, given the drafted tokens. The result is
        what `choose` would return one by one: at every position the target's own choice stands, and a drafted token
        that differs from it ends the row.
        """
        count = drafted.shape[0]
        positions, rows = self._get_positions(position, count + 1), self._rows.expand(count + 1)
        seen = None if self._seen is None else self._see_each(drafted)
        tokens = sample(logits, self._sampling, positions, rows=rows, seen=seen)
        is_accepted = (tokens[:-1] == drafted).cumprod(0)
        # One copy to the host for both.
        accepted, *values = torch.cat([is_accepted.sum(0, keepdim=True), tokens]).tolist()
        self._remember(tokens[None, : accepted + 1])
        return values[: accepted + 1]

    def _get_positions(self, first: int, count: int) -> Tensor:
        return torch.arange(first, first + count, device=self._rows.device)

    def _remember(self, tokens: Tensor) -> None:
        if self._seen is not None:
            self._seen.scatter_(1, tokens, True)

    def _see_each(self, drafted: Tensor) -> Tensor:
        """What has been seen before each of the drafted tokens and after the last, (n + 1, V)."""
        assert self._seen is not None
        count = drafted.shape[0]
        seen = self._seen.repeat(count + 1, 1)
        if count:
            is_before = torch.ones(count + 1, count, dtype=torch.bool, device=seen.device).tril(-1)
            added = torch.zeros_like(seen, dtype=torch.uint8)
            added.scatter_reduce_(1, drafted.expand(count + 1, count), is_before.to(torch.uint8), "amax")
            seen |= added.bool()
        return seen


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
        position: (1,) or (B,) int64, where the token will stand.
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
    """Standard Gumbel noise (B, V) float32 for the samples `rows` (B,) at `position` (1,) or (B,)."""
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
