"""A model of the shape of Llama 3.1 8B: the time of a token by what weights are held in and how much was read."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from acceptance.device import find_bandwidth
from acceptance.findings import Findings
from acceptance.random_weights import BF16, FP8, INT4_G32, INT4_G128, INT8, build_model
from acceptance.timing import find_device
from gptfast.bench.phases import Clock
from gptfast.checkpoint.presets import get_preset
from gptfast.config import ModelConfig, SamplingConfig
from gptfast.graphs import GraphBackend
from gptfast.kernels.cuda.products import Format
from gptfast.kernels.cuda.timing import free_memory, open_graphs
from gptfast.memory import get_available_memory
from gptfast.model import Transformer
from gptfast.runner import Runner
from gptfast.sampling import Sampler

CASES: tuple[tuple[Format, Format | None], ...] = (
    (INT4_G32, INT8),
    (BF16, None),
    (INT8, None),
    (FP8, None),
    (INT4_G128, INT8),
)
"""Forms of the matrices and of the output layer, the ones that matter most first."""
DEPTHS = (0, 2048, 16_384)
BLOCK_TOKENS = 64
BLOCKS = 3
"""That count, after one that does not."""
SLOWER = 1.5
"""How many times as long as the longest so far a case may take, for it to be begun."""
FREE_SHARE = 0.8
TITLE = "Llama 3.1 8B shape, one text, greedy: a token after so many, its bytes and share of the read bandwidth"


@dataclass(frozen=True)
class Decoding:
    """How long a token takes.

    Attributes:
        depth: tokens in the cache when the first block begins.
        ms_per_token: the median of the blocks.
        blocks_ms: of each block that counts, per token.
        weight_bytes, kv_bytes: that a step reads; of keys and values, in the middle of the blocks.
    """

    depth: int
    ms_per_token: float
    blocks_ms: tuple[float, ...]
    weight_bytes: int
    kv_bytes: int

    @property
    def gb_per_s(self) -> float:
        """GB of weights, keys and values a second."""
        return (self.weight_bytes + self.kv_bytes) / self.ms_per_token / 1e6


def run(findings: Findings) -> None:
    """Time every form at every depth, compiled, and the first one uncompiled too."""
    device, config = find_device(), get_preset("llama-3.1-8b")
    bandwidth = find_bandwidth(findings, device)
    findings.note(read_gb_per_s=bandwidth)
    longest_s = 0.0
    for compiles, (form, head) in [(False, CASES[0]), *((True, case) for case in CASES)]:
        name = f"{form.name}{f', head {head.name}' if head else ''}{'' if compiles else ', not compiled'}"
        left_s = findings.get_remaining_s()
        if left_s < SLOWER * longest_s:
            findings.note(**{f"left out, {name}": f"{left_s:.0f} s were left"})
            continue
        start = time.monotonic()
        with torch.no_grad():
            time_case(findings, device, config, form, head, name, bandwidth, compiles=compiles)
        free_memory(device)
        longest_s = max(longest_s, time.monotonic() - start)
    findings.check(
        "every form was timed",
        not any(fact.startswith("left out") for fact in findings.facts),
        ", ".join(fact for fact in findings.facts if fact.startswith("left out")) or "all",
        "model_8b.json; a larger --budget-s with --resume",
    )


def time_case(
    findings: Findings,
    device: torch.device,
    config: ModelConfig,
    form: Format,
    head: Format | None,
    name: str,
    bandwidth: float,
    *,
    compiles: bool,
) -> None:
    """A model's rows of the table; a fact instead where it does not fit the memory."""
    needed, free = estimate_bytes(config, form), get_available_memory(device)
    if free is not None and needed > FREE_SHARE * free:
        findings.note(**{f"too large, {name}": f"{needed / 1e9:.0f} GB, and {free / 1e9:.0f} are free"})
        return
    model = build_model(config, form, dtype=torch.bfloat16, device=device, head=head)
    for found in time_model(model, open_graphs(device), DEPTHS, compiles=compiles):
        findings.add_row(TITLE, describe_decoding(found, name, bandwidth))


def estimate_bytes(config: ModelConfig, form: Format) -> int:
    """Of the weights, an embedding in bfloat16 included, and a cache for the greatest depth."""
    bits: dict[str, float] = {"bf16": 16, "fp16": 16, "fp8": 8, "int8": 8.5, "int4": 4.5}
    q_dim, kv_dim = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    layer = config.dim * (2 * q_dim + 2 * kv_dim + 3 * config.ffn_dim)
    weights = config.n_layers * layer + config.vocab_size * config.dim
    kv = 2 * 2 * kv_dim * config.n_layers * 2 * max(DEPTHS)
    return int(weights * bits[form.kind] / 8) + 2 * config.vocab_size * config.dim + kv


def time_model(
    model: Transformer,
    graphs: GraphBackend | None,
    depths: Sequence[int],
    *,
    compiles: bool,
    block_tokens: int = BLOCK_TOKENS,
    clock: Clock = time.perf_counter,
) -> list[Decoding]:
    """Decode at each depth with steps recorded in `graphs`, or if None by torch; what the cache holds is random.

    Raises AssertionError if a step was not a replay of `graphs`, or chose no token.
    """
    runner = Runner(model, compile=compiles, graphs=graphs, uses_graph_trees=compiles and graphs is None)
    # At once, so that steps are recorded once, for the longest cache.
    runner.reserve(max(depths) + (1 + BLOCKS) * block_tokens + 1)
    for cache in model.list_caches():
        for buffer in (cache.k, cache.v):
            buffer.normal_()
    return [time_decoding(runner, depth, block_tokens, clock) for depth in depths]


def time_decoding(runner: Runner, depth: int, block_tokens: int, clock: Clock = time.perf_counter) -> Decoding:
    """Blocks of tokens from a depth on, by the clock of the host, which waits for the last of each.

    Steps are recorded in the first block, which does not count.
    """
    sampler = Sampler(SamplingConfig(), [0], runner.vocab_size, device=runner.device)
    token = torch.zeros(1, dtype=torch.int64, device=runner.device)
    before, blocks_ms = runner.replayed_steps, []
    for block in range(1 + BLOCKS):
        start = clock()
        chosen = [values[0] for values in runner.extend(sampler, token, depth + block * block_tokens, block_tokens)]
        blocks_ms.append(1e3 * (clock() - start) / block_tokens)
        assert all(0 <= value < runner.vocab_size for value in chosen)
    expected = 0 if runner.uses_graph_trees else (1 + BLOCKS) * block_tokens
    assert runner.replayed_steps - before == expected, "steps were not replayed"
    middle = depth + block_tokens + BLOCKS * block_tokens // 2
    return Decoding(
        depth,
        statistics.median(blocks_ms[1:]),
        tuple(blocks_ms[1:]),
        runner.model.count_weight_bytes_per_token(),
        middle * runner.kv_bytes_per_token,
    )


def describe_decoding(found: Decoding, name: str, bandwidth: float) -> dict[str, str]:
    """A row of the table."""
    return {
        "weights": name,
        "depth": str(found.depth),
        "ms/token": f"{found.ms_per_token:.3f}",
        "tokens/s": f"{1e3 / found.ms_per_token:.1f}",
        "blocks, ms": " ".join(f"{each:.3f}" for each in found.blocks_ms),
        "weights GB": f"{found.weight_bytes / 1e9:.3f}",
        "keys and values GB": f"{found.kv_bytes / 1e9:.3f}",
        "GB/s": f"{found.gb_per_s:.0f}",
        "share": f"{found.gb_per_s / bandwidth:.1%}",
    }
