"""How a step is executed: eagerly or compiled, in a few fixed shapes, on buffers that never move.

Shapes: B batch, S tokens in a call, N cache slots attended, V vocabulary.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from gptfast.compilation import CompilationError, CompileStatistics, Step, compile_for_recording, compile_step
from gptfast.config import SamplingConfig
from gptfast.decode import MOST_VERIFIED, decode_one_token, prefill, verify
from gptfast.errors import PromptError
from gptfast.fused import FusedTransformer
from gptfast.graphs import Fetched, GraphBackend, Moment, note_moment, send_ids
from gptfast.kernels.ops import can_attend
from gptfast.memory import get_available_memory
from gptfast.model import Transformer
from gptfast.replay import CAUGHT_UP, ROUND_SIZES, RecordedSteps, get_round_size, use_as_it_is
from gptfast.sampling import Sampler

logger = logging.getLogger(__name__)

PREFILL_CHUNKS = (32, 256)
"""Tokens read at once, small and large: one wastes little on a short prompt, the other keeps the cores busy."""
KV_ALIGNMENT = 32
"""Slots: attention on a CPU reads the filled part of the cache rounded up to this, which keeps its loops whole."""
SMALLEST_KV_GRAPH = 256
"""Slots: on CUDA it reads the filled part rounded up to this or a power of two above, each a CUDA graph."""
INITIAL_CAPACITY = {"cpu": 2048, "cuda": 8192}
"""Tokens: what the cache holds before it has to grow; growing costs a copy, and on CUDA new graphs."""

GREEDY = SamplingConfig()

ANY_SIZE = 0
"""Instead of a number of tokens: any from 2 to `MOST_VERIFIED`."""

CompileKind = Literal["cold", "cached", "none"]


class Runner:
    """Executes the steps of one model and owns what they write: KV caches and input buffers.

    The cache holds keys and values in `kv_dtype`, by default the model's. `compile` asks for compiled steps; `warm_up`
    makes them, and what was not warmed up is made when first needed. Where the machine cannot compile, a line in the
    log says so and the steps run eagerly.

    With `graphs` the steps that decode are recorded there and replayed, compiled or not, for a model that attends by
    its kernel; prompts are read by steps that are not recorded. `fused` computes what is recorded, as far as it can.
    `uses_graph_trees` leaves graphs to torch.compile, on CUDA.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        batch_size: int = 1,
        compile: bool = False,
        kv_dtype: torch.dtype | None = None,
        graphs: GraphBackend | None = None,
        uses_graph_trees: bool = False,
        fused: FusedTransformer | None = None,
    ) -> None:
        self.model = model
        self.kv_dtype = kv_dtype or model.dtype
        self.batch_size = batch_size
        self.compile_statistics = CompileStatistics()
        self.is_compiled = self.compiling_was_asked = compile
        self.context = model.config.max_seq_len
        self.vocab_size = model.config.vocab_size
        self.device = model.device
        self._steps: dict[tuple[Step, int], Step] = {}
        self._separate_step: Step | None = None
        self._separates_kernels = False
        self._capacity = 0
        self.graphs, self.uses_graph_trees, self.fused = graphs, uses_graph_trees, fused
        prepare = compile_for_recording if compile else use_as_it_is
        self._recorded: RecordedSteps | None = None
        if graphs is not None:
            self._recorded = RecordedSteps(model, batch_size, graphs, prepare, self.compile_statistics, fused)
        self._input_pos = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.reserve(min(INITIAL_CAPACITY[self.device.type], self.context))

    @property
    def capacity(self) -> int:
        """Tokens that the cache can hold now."""
        return self._capacity

    @property
    def compile_kind(self) -> CompileKind:
        """`none` if steps run eagerly, `cold` if this process has compiled any of them, `cached` if it loaded all."""
        if not self.is_compiled:
            return "none"
        return "cold" if self.compile_statistics.compiled else "cached"

    @property
    def replayed_steps(self) -> int:
        """How many decode steps were replays of recorded ones."""
        return 0 if self._recorded is None else self._recorded.replayed

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that one token of one row takes in the cache, in all layers."""
        return self.model.config.get_kv_bytes_per_token(self.kv_dtype.itemsize, has_scales=self.kv_dtype == torch.int8)

    @torch.no_grad()
    def reserve(self, length: int) -> None:
        """Make room for `length` tokens and keep what the cache holds; raise PromptError beyond the context."""
        if length > self.context:
            raise PromptError(
                f"{length} tokens are asked for but the model's context is {self.context}; "
                "shorten the prompt or ask for fewer new tokens"
            )
        if length <= self._capacity:
            return
        capacity = min(self.context, max(length, 2 * self._capacity))
        held = [dict(cache.named_buffers()) for cache in self.model.list_caches()] if self._capacity else []
        # Padding of the last chunk is written after the last token.
        slots = round_up(capacity, KV_ALIGNMENT) + max(PREFILL_CHUNKS)
        self._check_memory(slots)
        self.model.setup_caches(self.batch_size, slots, self.kv_dtype)
        for cache, earlier in zip(self.model.list_caches(), held, strict=False):
            for name, buffer in cache.named_buffers():
                buffer[:, :, : self._capacity] = earlier[name][:, :, : self._capacity]
        self._positions = torch.arange(slots, device=self.device)
        self._capacity = capacity
        if self._recorded is not None:
            self._recorded.forget(last_pos=slots - 1)

    def _check_memory(self, slots: int) -> None:
        needed = self.batch_size * slots * self.kv_bytes_per_token
        free = get_available_memory(self.device)
        if free is not None and needed > free:
            raise PromptError(
                f"the key/value cache for {slots} tokens x batch size {self.batch_size} takes {needed / 1e9:.1f} GB "
                f"and {free / 1e9:.1f} GB are free on {self.device.type}; shorten the text or use a smaller batch"
            )

    @torch.no_grad()
    def warm_up(
        self,
        prompt_tokens: int | None = None,
        *,
        sampling: SamplingConfig = GREEDY,
        verifies: bool = False,
        drafts_for: int | None = None,
    ) -> None:
        """Compile the steps that generating from a prompt of that length needs, or from any prompt if None.

        `sampling` is how tokens will be chosen, which is a part of recorded steps. `verifies` is for who calls
        `accept` instead of `extend`, and `drafts_for`, the target's number of ids, for who calls `draft`.
        """
        sizes = PREFILL_CHUNKS if prompt_tokens is None else plan_chunks(prompt_tokens)
        for size in sorted(set(sizes), reverse=True):
            self._get_step(prefill, size)
        if self._recorded is not None:
            if verifies:
                for size in ROUND_SIZES:
                    self._recorded.get_round(sampling.kind, size)
            elif drafts_for is not None:
                self._recorded.get_catcher(sampling.kind, min(drafts_for, self.vocab_size))
            else:
                self._recorded.get_extender(sampling.kind)
            return
        self._get_step(decode_one_token, 1)
        if verifies or drafts_for is not None:
            for size in ROUND_SIZES[1:] if self.device.type == "cuda" else [ANY_SIZE]:
                self._get_step(verify, size)

    @torch.no_grad()
    def prefill(self, tokens: Sequence[int], start: int = 0) -> Tensor:
        """Read tokens into the cache from position `start` on; (B, V) float32 logits after the last.

        With B > 1 all rows read the same tokens; they are computed once.
        """
        for count, chunk, input_pos, kv_pos in self._split(tokens, start):
            last = torch.full((1,), count - 1, device=self.device)
            logits = self._get_step(prefill, chunk.shape[1])(self.model, chunk, input_pos, kv_pos, last)
        return logits.expand(self.batch_size, -1)

    @torch.no_grad()
    def score(self, tokens: Sequence[int], start: int = 0) -> Tensor:
        """Read tokens into the cache as `prefill` does; (S, V) float32 logits after every one of them."""
        logits = [
            self._get_step(verify, chunk.shape[1])(self.model, chunk, input_pos, kv_pos)[0, :count]
            for count, chunk, input_pos, kv_pos in self._split(tokens, start)
        ]
        return torch.cat(logits)

    @torch.no_grad()
    def decode(self, tokens: Tensor, position: int) -> Tensor:
        """Extend every row by its token (B,) int64 at `position`; (B, V) float32 logits of the next."""
        self.reserve(position + 1)
        if self._recorded is not None and not self._separates_kernels:
            return self._recorded.read(tokens[:, None], position)[:, 0].clone()
        self._input_pos.fill_(position)
        kv_pos = self._get_kv_pos(position + 1)
        return self._get_step(decode_one_token, 1)(self.model, tokens[:, None].contiguous(), self._input_pos, kv_pos)

    @torch.no_grad()
    def extend(self, sampler: Sampler, tokens: Tensor, position: int, count: int) -> Iterator[list[int]]:
        """The `count` next tokens of every row after its token (B,) int64 at `position`, one of each row at a time.

        `sampler` chooses them. Where steps are recorded the device may be one token ahead.
        """
        if self._recorded is not None:
            self.reserve(position + count)
            yield from self._recorded.extend(sampler, tokens, position, count)
            return
        for place in range(position + 1, position + 1 + count):
            tokens = sampler.choose(self.decode(tokens, place - 1), place)
            yield tokens.tolist()

    @torch.no_grad()
    def verify(self, tokens: Tensor, position: int) -> Tensor:
        """Extend a single row by tokens (S,) int64 from `position` on; (S, V) float32 logits after every one of them.

        S is 2 to `MOST_VERIFIED`. One step computes them all, and each row is that of `decode`, to the bit where
        the CPU kernels or CUDA's own do the products. What is rejected afterwards need not be cleared: positions tell
        which slots are filled.
        """
        count = tokens.shape[0]
        assert 2 <= count <= MOST_VERIFIED
        self.reserve(position + count)
        has_sizes = self._recorded is not None or self.device.type == "cuda"
        size = get_round_size(count) if has_sizes else count
        tokens = F.pad(tokens, (0, size - count))[None]
        if self._recorded is not None:
            return self._recorded.read(tokens, position)[0, :count].clone()
        input_pos = self._positions[position : position + size].clone()
        step = self._get_step(verify, size if has_sizes else ANY_SIZE)
        return step(self.model, tokens, input_pos, self._get_kv_pos(position + count))[0, :count]

    @torch.no_grad()
    def accept(self, sampler: Sampler, last: int, drafted: Tensor, position: int) -> list[int]:
        """The next tokens of a single row, whose token at `position` is `last`, as `Sampler.accept` chooses them.

        `drafted` (n,) int64 are the up to `MOST_VERIFIED` - 1 tokens that a draft has after it; of none, this is a
        plain step.
        """
        self.reserve(position + 1 + drafted.shape[0])
        if self._recorded is not None:
            return self._recorded.accept(sampler, last, drafted, position)
        tokens = torch.cat([torch.full((1,), last, device=self.device), drafted])
        logits = self.verify(tokens, position) if len(drafted) else self.decode(tokens, position)
        return sampler.accept(logits, position + 1, drafted)

    @torch.no_grad()
    def draft(self, sampler: Sampler, tokens: Sequence[int], position: int, count: int, vocab_size: int) -> Tensor:
        """The `count` tokens (count,) int64 with which a single row goes on after its tokens from `position` on.

        They are what `sampler` would choose by this model, of the first `vocab_size` ids, and it does not remember
        them; the last of them is not read. On CUDA the host does not wait for any.
        """
        vocab_size = min(vocab_size, self.vocab_size)
        at_once = MOST_VERIFIED if self._recorded is None else CAUGHT_UP
        self.reserve(position + len(tokens) + count - 1)
        if len(tokens) > at_once:
            self.prefill(tokens[:-1], position)
            tokens, position = tokens[-1:], position + len(tokens) - 1
        if self._recorded is not None:
            return self._recorded.draft(sampler, tokens, position, count, vocab_size)
        ids, place = send_ids(tokens, self.device), position + len(tokens)
        logits = self.decode(ids, position) if len(tokens) == 1 else self.verify(ids, position)[-1:]
        drafted = torch.empty(count, dtype=torch.int64, device=self.device)
        for i in range(count):
            drafted[i : i + 1] = sampler.propose(logits[:, :vocab_size], place + i, drafted[:i])
            if i + 1 < count:
                logits = self.decode(drafted[i : i + 1], place + i)
        return drafted

    def fetch(self, values: Tensor) -> Fetched:
        """Begin to copy a tensor to the host; see `GraphBackend.fetch`."""
        return values.tolist if self.graphs is None else self.graphs.fetch(values)

    def note_moment(self) -> Moment:
        """When the device has done what it was asked for so far."""
        return note_moment(self.device)

    @contextlib.contextmanager
    def separate_kernels(self) -> Iterator[None]:
        """Within, `decode` executes a slower step whose kernels can be timed one by one; see `compile_step`."""
        key = (decode_one_token, 1)
        usual = self._steps.get(key)
        if self.is_compiled:
            self._steps[key] = self._separate_step = self._separate_step or self._make_separate_step()
        self._separates_kernels = True
        try:
            yield
        finally:
            self._separates_kernels = False
            del self._steps[key]
            if usual is not None:
                self._steps[key] = usual

    @torch.no_grad()
    def _make_separate_step(self) -> Step:
        inputs = self._make_inputs(decode_one_token, 1)
        return compile_step(decode_one_token, self.model, inputs, separate_kernels=True).call

    def _split(self, tokens: Sequence[int], start: int) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        """Each chunk's count of tokens, the tokens (1, size) padded at the end, their positions and slots to attend."""
        assert len(tokens) > 0
        self.reserve(start + len(tokens))
        remaining = torch.tensor(tokens, dtype=torch.int64)
        for size in plan_chunks(len(tokens)):
            chunk, remaining = remaining[:size], remaining[size:]
            count = len(chunk)
            padded = torch.zeros(1, size, dtype=torch.int64)
            padded[0, :count] = chunk
            input_pos = self._positions[start : start + size].clone()
            yield count, padded.to(self.device), input_pos, self._get_chunk_kv_pos(start, count, size)
            start += count

    def _get_kv_pos(self, length: int) -> Tensor:
        """The slots to attend over when `length` of them are filled: those and a few empty ones."""
        if self.device.type == "cuda":
            return self._positions[: max(SMALLEST_KV_GRAPH, 1 << (length - 1).bit_length())]
        return self._positions[: round_up(length, KV_ALIGNMENT)]

    def _get_chunk_kv_pos(self, start: int, count: int, size: int) -> Tensor:
        """The slots for a step of `size` tokens from `start` on, of which those after the first `count` are padding."""
        if self.model.flashes and not can_attend(self.model.kernels, size):
            return self._positions[: start + size]
        return self._get_kv_pos(start + count)

    def _get_step(self, function: Step, size: int) -> Step:
        if (function, size) not in self._steps:
            self._steps[function, size] = self._make_step(function, size)
        return self._steps[function, size]

    @torch.no_grad()  # a compiled step holds only in the grad mode that it was compiled in
    def _make_step(self, function: Step, size: int) -> Step:
        if not self.is_compiled:
            return function
        try:
            any_size = range(2, MOST_VERIFIED + 1) if size == ANY_SIZE else None
            inputs = self._make_inputs(function, MOST_VERIFIED if size == ANY_SIZE else size)
            step = compile_step(function, self.model, inputs, sizes=any_size, uses_graph_trees=self.uses_graph_trees)
        except CompilationError as error:
            logger.warning("nothing can be compiled here, so steps run eagerly, which is slower: %s", error)
            self.is_compiled = False
            self._steps.clear()
            return function
        self.compile_statistics.seconds += step.seconds
        self.compile_statistics.loaded += step.is_cached
        self.compile_statistics.compiled += not step.is_cached
        return step.call

    def _make_inputs(self, function: Step, size: int) -> dict[str, Tensor]:
        """Inputs of a step like those of every later call; what it writes lands in the slots kept for padding."""
        rows = self.batch_size if function is decode_one_token else 1
        inputs = {
            "tokens": torch.zeros(rows, size, dtype=torch.int64, device=self.device),
            "input_pos": self._positions[-size:].clone(),
            "kv_pos": self._get_chunk_kv_pos(0, size, size),
        }
        return inputs | {"last": torch.full((1,), size - 1, device=self.device)} if function is prefill else inputs


def plan_chunks(length: int) -> list[int]:
    """The sizes of the chunks that a prompt of `length` tokens is read in; only the last is padded.

    Large chunks while they are more than half full, then small ones.
    """
    small, large = PREFILL_CHUNKS
    n_large = (length + large // 2 - 1) // large
    n_small = -(-max(0, length - n_large * large) // small)
    return [large] * n_large + [small] * n_small


def round_up(value: int, multiple: int) -> int:
    """The least multiple that is not below `value`."""
    return -(-value // multiple) * multiple
