"""From logits to the next token, on the device that holds them and without a word to the host.

Noise is counter-based: a pure function of (seed, row, position, token id). So the same seed gives the same text
whatever was computed before, in which batch, and however a step was executed.

Shapes: B batch, V vocabulary.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from gptfast.config import SamplingConfig, SamplingKind

GOLDEN_GAMMA = -0x61C8864680B583EB  # 2**64 / golden ratio, as a signed 64-bit integer
GOLDEN_GAMMA_INVERSE = -0xE217C1E66C88CC3  # times GOLDEN_GAMMA it is 1, modulo 2**64
DIGIT_BITS = {"cpu": 1, "cuda": 4}
"""That a search among floats finds at once. On a CPU every float that is looked at is a pass over the vocabulary; on
CUDA a pass is a launch or two, whatever it looks at."""


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


class SamplingTensors:
    """The values of a `SamplingConfig` on a device, each a tensor of no dimension: a recorded step reads them there.

    `load` changes the values; of `kind` is the code that reads them.
    """

    def __init__(self, kind: SamplingKind, device: torch.device | str) -> None:
        self.kind = kind
        self._loaded: SamplingConfig | None = None
        self.temperature = torch.ones((), device=device)
        self.top_k = torch.zeros((), dtype=torch.int64, device=device)
        self.top_p = torch.ones((), device=device)
        self.log_min_p = torch.zeros((), device=device)
        self.repetition_penalty = torch.ones((), device=device)
        self.seed = torch.zeros((), dtype=torch.int64, device=device)

    def load(self, sampling: SamplingConfig) -> None:
        """Take the values of a configuration of this kind."""
        assert sampling.kind == self.kind
        # A round would else launch a fill for every value that is there already.
        if sampling == self._loaded:
            return
        self._loaded = sampling
        self.temperature.fill_(sampling.temperature)
        self.top_k.fill_(sampling.top_k or 0)
        self.top_p.fill_(sampling.top_p)
        self.log_min_p.fill_(sampling.log_min_p)
        self.repetition_penalty.fill_(sampling.repetition_penalty)
        self.seed.fill_(sampling.seed)


class Sampler:
    """Chooses the tokens of texts that grow together, and remembers what the repetition penalty needs.

    Attributes:
        sampling: how they are chosen.
        rows: (B,) int64, which sample each text is.
        seen: (B, V) bool, the tokens of each so far; None without a penalty.
    """

    def __init__(
        self,
        sampling: SamplingConfig,
        prompt_ids: Sequence[int],
        vocab_size: int,
        *,
        sample_ids: Sequence[int] = (0,),
        device: torch.device | str = "cpu",
    ) -> None:
        self.sampling = sampling
        self.rows = torch.tensor(sample_ids, device=device)
        self.seen: Tensor | None = None
        if sampling.kind.has_penalty:
            self.seen = torch.zeros(len(sample_ids), vocab_size, dtype=torch.bool, device=device)
            self.seen[:, torch.tensor(prompt_ids, device=device)] = True

    def choose(self, logits: Tensor, position: int) -> Tensor:
        """The next token of every text, (B,) int64 for `position`, from (B, V) logits."""
        tokens = sample(logits, self.sampling, self._get_positions(position, 1), rows=self.rows, seen=self.seen)
        self.remember(tokens[:, None])
        return tokens

    def propose(self, logits: Tensor, position: int, drafted: Tensor) -> Tensor:
        """What a text of its own would have at `position`, (1,) int64, if it went on with the n tokens `drafted` (n,).

        `logits` (1, V or less) are those of a draft model. The noise is that of `choose` there, so a draft model that
        knows the target's probabilities chooses the target's token.
        """
        seen = None if self.seen is None else see_each(self.seen, drafted)[-1:, : logits.shape[-1]]
        return sample(logits, self.sampling, self._get_positions(position, 1), rows=self.rows, seen=seen)

    def accept(self, logits: Tensor, position: int, drafted: Tensor) -> list[int]:
        """The next tokens of a single text, one more than are accepted of the n `drafted` (n,) for `position` on.

        `logits` (n + 1, V) are the target's for `position` and those after it, given the drafted tokens. The result is
        what `choose` would return one by one: at every position the target's own choice stands, and a drafted token
        that differs from it ends the row.
        """
        count = drafted.shape[0]
        positions = self._get_positions(position, count + 1)
        with on_one_thread():
            result = accept_tokens(logits, drafted, self.sampling, positions, self.rows, self.seen)
        # One copy to the host for both.
        accepted, *values = result.tolist()
        self.remember(result[None, 1 : accepted + 2])
        return values[: accepted + 1]

    def remember(self, tokens: Tensor) -> None:
        """Note tokens (B, n) int64 of every text, for the repetition penalty."""
        if self.seen is not None:
            self.seen.scatter_(1, tokens, True)

    def _get_positions(self, first: int, count: int) -> Tensor:
        return torch.arange(first, first + count, device=self.rows.device)


@on_one_thread()
def sample(
    logits: Tensor,
    sampling: SamplingConfig,
    position: Tensor,
    *,
    rows: Tensor | None = None,
    seen: Tensor | None = None,
) -> Tensor:
    """`choose_tokens` for small tensors, called eagerly; `rows` are 0 to B-1 if None."""
    if rows is None:
        rows = torch.arange(logits.shape[0], device=logits.device)
    return choose_tokens(logits, sampling, position, rows, seen)


def choose_tokens(
    logits: Tensor,
    sampling: SamplingConfig | SamplingTensors,
    position: Tensor,
    rows: Tensor,
    seen: Tensor | None = None,
) -> Tensor:
    """Choose one token per row; the lowest id among equals.

    Args:
        logits: (B, V) of any floating dtype.
        sampling: how; both forms of the same values choose the same tokens.
        position: (1,) or (B,) int64, where the token will stand.
        rows: (B,) int64, which sample each row is.
        seen: (B, V) bool, the tokens that the repetition penalty is for.

    Returns:
        (B,) int64 token ids.
    """
    logits = adjust_logits(logits, sampling, seen)
    if sampling.kind.is_greedy:
        return logits.argmax(dim=-1)
    # The Gumbel-max trick (Gumbel 1954): argmax of logits + noise is distributed as softmax of logits.
    return (logits + draw_gumbel(sampling.seed, rows, position, logits.shape[-1])).argmax(dim=-1)


def accept_tokens(
    logits: Tensor,
    drafted: Tensor,
    sampling: SamplingConfig | SamplingTensors,
    positions: Tensor,
    row: Tensor,
    seen: Tensor | None = None,
    count: Tensor | None = None,
) -> Tensor:
    """The target's own choices beside drafted tokens, and how many of these they confirm.

    Args:
        logits: (n + 1, V), the target's before each of the drafted tokens and after the last.
        drafted: (n,) int64.
        sampling: how tokens are chosen.
        positions: (n + 1,) int64, where the choices will stand.
        row: (1,) int64, which sample the text is.
        seen: (1, V) bool, the tokens so far that the repetition penalty is for.
        count: (1,) int64, how many were drafted; what follows them is padding. All n if None.

    Returns:
        (n + 2,) int64: how many of the first drafted tokens are those that are chosen there, then the n + 1 choices.
        Of the choices, those up to the first that differs from its drafted token hold.
    """
    n = drafted.shape[0]
    tokens = choose_tokens(
        logits, sampling, positions, row.expand(n + 1), None if seen is None else see_each(seen, drafted)
    )
    is_confirmed = tokens[:-1] == drafted
    if count is not None:
        is_confirmed = is_confirmed & (torch.arange(n, device=drafted.device) < count)
    return torch.cat([is_confirmed.cumprod(0).sum(0, keepdim=True), tokens])


def see_each(seen: Tensor, drafted: Tensor) -> Tensor:
    """What has been seen before each of the drafted tokens (n,) and after the last, (n + 1, V), from (1, V) before."""
    places = torch.arange(drafted.shape[0], device=drafted.device)
    # Each row has as many: instead of the tokens after its place, that of its place again.
    before = drafted[torch.minimum(places[:, None], places)]
    return torch.cat([seen, seen.repeat(drafted.shape[0], 1).scatter(1, before, True)])


def adjust_logits(logits: Tensor, sampling: SamplingConfig | SamplingTensors, seen: Tensor | None = None) -> Tensor:
    """Apply penalty, temperature and filters to (B, V) logits; (B, V) float32, -inf for what is left out.

    The largest logit always stays, and a filter never parts equal logits: all that equal the last one kept stay.
    """
    logits, kind = logits.float(), sampling.kind
    if seen is not None and kind.has_penalty:
        penalty = sampling.repetition_penalty
        logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    if kind.is_greedy:
        return logits
    # Without the maximum a temperature near zero would overflow.
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / sampling.temperature
    if kind.has_top_k:
        assert sampling.top_k is not None
        logits = logits.masked_fill(logits < find_kth_largest(logits, sampling.top_k), -math.inf)
    if kind.has_top_p:
        probabilities = logits.softmax(dim=-1)
        least = find_nucleus_threshold(probabilities, sampling.top_p)
        logits = logits.masked_fill(probabilities < least, -math.inf)
    if kind.has_min_p:
        least = logits.amax(dim=-1, keepdim=True) + sampling.log_min_p
        logits = logits.masked_fill(logits < least, -math.inf)
    return logits


def find_kth_largest(logits: Tensor, k: int | Tensor) -> Tensor:
    """The k-th largest of every row of (B, V) float32 logits, none of them positive, (B, 1); the least if V < k.

    A k that only the device knows is counted up to, by a search over the bits of the floats.
    """
    if isinstance(k, int):
        return logits.topk(min(k, logits.shape[-1]), dim=-1).values[..., -1:]
    bits = -(0 - logits).view(torch.int32)

    def has_enough(thresholds: Tensor) -> Tensor:
        return (bits[:, None] >= thresholds[..., None]).sum(dim=-1) >= k

    found = find_largest(bits.amin(dim=-1, keepdim=True), bits.amax(dim=-1, keepdim=True), has_enough)
    return 0 - (-found).view(torch.float32)


def find_nucleus_threshold(probabilities: Tensor, top_p: float | Tensor) -> Tensor:
    """The largest of the (B, V) probabilities, (B, 1), that leaves at least `top_p` at or above it.

    What is at or above it is the nucleus of Holtzman et al. 2020. It is found by a search over the bits of the
    floats, which order non-negative numbers: sorting 49,152 of them takes 6 ms on a CPU, longer than a decode step
    of a small model, and 31 sums take 1 ms.
    """
    bits = probabilities.view(torch.int32)

    def has_enough(thresholds: Tensor) -> Tensor:
        return probabilities[:, None].where(bits[:, None] >= thresholds[..., None], 0).sum(dim=-1) >= top_p

    high = bits.amax(dim=-1, keepdim=True)
    return find_largest(torch.zeros_like(high), high, has_enough).view(torch.float32)


def find_largest(low: Tensor, high: Tensor, has_enough: Callable[[Tensor], Tensor]) -> Tensor:
    """The largest integers from `low` to `high`, (B, 1) int32, that have enough; `low` if none has.

    `has_enough` tells it of (B, n) integers. There are less than 2**31 to choose from, and what has enough still has it
    at every smaller integer. The distance from `low` is found digit by digit, from the highest on.
    """
    digit_bits = DIGIT_BITS[low.device.type]
    found = low
    for shift in range((31 - 1) // digit_bits * digit_bits, -1, -digit_bits):
        digits = torch.arange(1, 1 << min(digit_bits, 31 - shift), dtype=torch.int32, device=low.device)
        candidates = found + (digits << shift)
        is_enough = has_enough(candidates) & (candidates <= high)
        found = found + (is_enough.sum(dim=-1, keepdim=True, dtype=torch.int32) << shift)
    return found


def draw_gumbel(seed: int | Tensor, rows: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise (B, V) float32 for the samples `rows` (B,) at `position` (1,) or (B,)."""
    stream = mix_bits(mix_bits(mix_bits(rows) ^ seed) + position)
    counter = torch.arange(1, vocab_size + 1, device=rows.device)
    # stream + counter * GOLDEN_GAMMA; in that form Inductor takes the product for an index, of 32 bits on CUDA.
    bits = mix_bits(((stream * GOLDEN_GAMMA_INVERSE)[:, None] + counter) * GOLDEN_GAMMA)
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
