"""The time of a token by what a model's weights are held in and how much was read, and which kernels take it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from acceptance.breakdown import break_down_step
from acceptance.findings import MEASURED, Findings
from acceptance.random_weights import build_model
from gptfast.bench.phases import Clock
from gptfast.checkpoint.presets import get_preset
from gptfast.config import ModelConfig, SamplingConfig
from gptfast.fused import FusedTransformer, has_pdl
from gptfast.graphs import GraphBackend
from gptfast.kernels.cuda.products import Format
from gptfast.kernels.cuda.timing import free_memory, open_graphs
from gptfast.memory import get_available_memory
from gptfast.model import Transformer
from gptfast.runner import Runner
from gptfast.sampling import Sampler

BLOCK_TOKENS = 64
BLOCKS = 3
"""That count, after one that does not."""
SLOWER = 1.5
"""How many times as long as the longest so far a case may take, for it to be begun."""
FREE_SHARE = 0.8
LEAST_S = 10
"""Seconds without which none is begun."""
TITLE = "one text, greedy: a token after so many, its bytes and share of the read bandwidth"
LEFT_OUT = "left out"
BROKEN_DOWN_DEPTH = 2048


@dataclass(frozen=True)
class Case:
    """A form of the matrices, one of the output layer where it is another, and how steps are computed.

    Attributes:
        form, head: of the matrices, and of the output layer's if that is another.
        compiles: what there is to compile of steps: all, or of fused ones the choice of tokens.
        fuses: whether steps are the fused pass.
        pdl: of that, whether kernels begin before those ahead of them end, where the GPU has that.
    """

    form: Format
    head: Format | None = None
    compiles: bool = True
    fuses: bool = False
    pdl: bool = True

    @property
    def weights(self) -> str:
        """For reports, what matrices are held in."""
        return f"{self.form.name}{'' if self.head is None else f', head {self.head.name}'}"

    @property
    def name(self) -> str:
        """For reports, all of it."""
        step = (", fused" if self.pdl else ", fused without PDL") if self.fuses else ""
        return f"{self.weights}{step}{'' if self.compiles else ', not compiled'}"


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


def time_cases(
    findings: Findings,
    device: torch.device,
    preset: str,
    cases: Sequence[Case],
    depths: Sequence[int],
    bandwidth: float,
) -> None:
    """Rows and facts of every case while there is time; a fact instead of one that there is none left for."""
    config, longest_s = get_preset(preset), 0.0
    for case in cases:
        left_s = findings.get_remaining_s()
        if left_s < max(LEAST_S, SLOWER * longest_s):
            findings.note(**{f"{LEFT_OUT}, {case.name}": f"{left_s:.0f} s were left"})
            continue
        start = time.monotonic()
        needed, free = estimate_bytes(config, case.form, max(depths)), get_available_memory(device)
        if free is not None and needed > FREE_SHARE * free:
            findings.note(**{f"too large, {case.name}": f"{needed / 1e9:.0f} GB, and {free / 1e9:.0f} are free"})
            continue
        with torch.no_grad():
            model = build_model(config, case.form, dtype=torch.bfloat16, device=device, head=case.head)
            time_case(findings, preset, case, model, depths, bandwidth)
        del model
        free_memory(device)
        longest_s = max(longest_s, time.monotonic() - start)


def time_case(
    findings: Findings, preset: str, case: Case, model: Transformer, depths: Sequence[int], bandwidth: float
) -> None:
    """A model's rows, and the kernels of a step at one of the depths."""
    fused = FusedTransformer(model, pdl=case.pdl and has_pdl(model.device)) if case.fuses else None
    graphs = open_graphs(model.device)
    runner = open_runner(model, graphs, depths, compiles=case.compiles, block_tokens=BLOCK_TOKENS, fused=fused)
    for depth in depths:
        found = time_decoding(runner, depth, BLOCK_TOKENS)
        findings.add_row(f"{preset} shape, {TITLE}", describe_decoding(found, case.name, bandwidth))
        line = {"model": preset, "kind": case.form.kind, "weights": case.name, "depth": depth}
        line |= {"ms_per_token": found.ms_per_token, "share": found.gb_per_s / bandwidth}
        line |= {"matrices": case.weights, "fused": case.fuses, "is_usual": case.compiles and case.pdl}
        findings.note(**{MEASURED: [*findings.facts.get(MEASURED, []), line]})
        if depth == BROKEN_DOWN_DEPTH:
            title = f"{preset}, {case.name}: the kernels of one step at depth {depth}"
            break_down_step(findings, runner, depth, 1e3 * found.ms_per_token, title)


def estimate_bytes(config: ModelConfig, form: Format, depth: int) -> int:
    """Of the weights, an embedding in bfloat16 included, and of a cache for that depth."""
    bits: dict[str, float] = {"bf16": 16, "fp16": 16, "fp8": 8, "int8": 8.5, "int4": 4.5}
    q_dim, kv_dim = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    layer = config.dim * (2 * q_dim + 2 * kv_dim + 3 * config.ffn_dim)
    weights = config.n_layers * layer + config.vocab_size * config.dim
    kv = 2 * 2 * kv_dim * config.n_layers * 2 * depth
    return int(weights * bits[form.kind] / 8) + 2 * config.vocab_size * config.dim + kv


def open_runner(
    model: Transformer,
    graphs: GraphBackend | None,
    depths: Sequence[int],
    *,
    compiles: bool,
    block_tokens: int = BLOCK_TOKENS,
    fused: FusedTransformer | None = None,
) -> Runner:
    """Of steps recorded in `graphs`, or if None by torch, with room for blocks at each depth; the cache is random."""
    runner = Runner(model, compile=compiles, graphs=graphs, uses_graph_trees=compiles and graphs is None, fused=fused)
    # At once, so that steps are recorded once, for the longest cache.
    runner.reserve(max(depths) + (1 + BLOCKS) * block_tokens + 1)
    for cache in model.list_caches():
        for buffer in (cache.k, cache.v):
            buffer.normal_()
    return runner


def time_decoding(
    runner: Runner, depth: int, block_tokens: int = BLOCK_TOKENS, clock: Clock = time.perf_counter
) -> Decoding:
    """Blocks of tokens from a depth on, by the clock of the host, which waits for the last of each.

    Steps are recorded in the first block, which does not count. Raises AssertionError if a step was not a replay, or
    chose no token.
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
