"""What is compared with: the same shapes by torch's own products and compiler, by torchao and by transformers."""

from __future__ import annotations

import contextlib
import importlib.util
import signal
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch._dynamo
from peers.transformers_worker import Clock as TokenClock
from torch import Tensor, nn

from acceptance.decoding import (
    BLOCK_TOKENS,
    BLOCKS,
    FREE_SHARE,
    LEFT_OUT,
    Decoding,
    describe_decoding,
    estimate_bytes,
    open_runner,
    time_decoding,
)
from acceptance.device import find_bandwidth
from acceptance.findings import Findings
from acceptance.random_weights import BF16, build_model
from acceptance.timing import find_device
from gptfast.bench.phases import Clock
from gptfast.checkpoint.presets import get_preset
from gptfast.compilation import has_recorded_cuda_graphs
from gptfast.config import ModelConfig
from gptfast.kernels.cuda.timing import free_memory, open_graphs
from gptfast.memory import get_available_memory
from gptfast.model import Transformer, TransformerBlock

DEPTHS = (0, 2048, 16_384)
"""Of what has attention of ours; torch's own reads a power of two of slots, each of which would be another graph."""
TITLE = "What is compared with, one text, greedy"
MOST_S = 60
"""That one may take."""
RESERVE_S = 3
"""Left when the last one ends, to write."""
TORCHAO_GROUP = 128

Measure = Callable[[ModelConfig, torch.device], list[Decoding]]


class OutOfTime(BaseException):
    """A baseline takes too long. Not an Exception, as compilers catch those and go on."""


@dataclass(frozen=True)
class Baseline:
    """A way to decode.

    Attributes:
        name: for reports.
        preset: the model's shape.
        measure: decodes with it.
        least_s: seconds without which it is not begun.
        package: that it needs, and whose failures are none of ours.
        uses_torchs_graphs: whether torch must have recorded its CUDA graphs for the figure to count.
    """

    name: str
    preset: str
    measure: Measure
    least_s: float
    package: str | None = None
    uses_torchs_graphs: bool = False


def run(findings: Findings) -> None:
    """Time each while there is time; what is left out is a fact and no failure."""
    device = find_device()
    bandwidth = find_bandwidth(findings, device)
    findings.note(read_gb_per_s=bandwidth)
    for baseline in BASELINES:
        run_baseline(findings, baseline, get_preset(baseline.preset), device, bandwidth)
        free_memory(device)


def run_baseline(
    findings: Findings, baseline: Baseline, config: ModelConfig, device: torch.device, bandwidth: float
) -> None:
    """Add a baseline's rows, or a fact that says why there are none.

    What fails in torch is a failed check, and what fails in another package a fact.
    """
    case = f"{baseline.preset}, {baseline.name}"
    if obstacle := find_obstacle(findings, baseline, config, device):
        findings.note(**{f"{LEFT_OUT}, {case}": obstacle})
        return
    start = time.monotonic()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    try:
        with limit_time(min(MOST_S, findings.get_remaining_s() - RESERVE_S)), torch.no_grad():
            decodings = baseline.measure(config, device)
    except OutOfTime:
        findings.note(**{f"{LEFT_OUT}, {case}": f"ended after {time.monotonic() - start:.0f} s"})
        return
    except Exception as error:  # of any kind: most of it is others' code, and the next baseline has none of it
        traceback.print_exc()
        words = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
        if baseline.package is None:
            findings.check(f"{case}: it can be timed", False, words, "baselines.log")
        else:
            findings.note(**{f"failed, {case}": words})
        return
    name = baseline.name
    if baseline.uses_torchs_graphs and not has_recorded_cuda_graphs():
        name += ", CUDA graphs skipped"
        if baseline.package is None:
            look_at = "baselines.log: why CUDA graphs were skipped; the figure counts only with them"
            findings.check(f"{case}: torch recorded its graphs", False, "counters of torch.compile", look_at)
    for decoding in decodings:
        findings.add_row(TITLE, {"model": baseline.preset} | describe_decoding(decoding, name, bandwidth))
    findings.note(**{f"{case}, s": time.monotonic() - start})


def find_obstacle(findings: Findings, baseline: Baseline, config: ModelConfig, device: torch.device) -> str | None:
    """Why it is not even begun."""
    if baseline.package is not None and importlib.util.find_spec(baseline.package) is None:
        return f"{baseline.package} is not installed"
    left_s = findings.get_remaining_s() - RESERVE_S
    if left_s < baseline.least_s:
        return f"{left_s:.0f} s were left"
    needed, free = estimate_bytes(config, BF16, max(DEPTHS)), get_available_memory(device)
    if free is not None and needed > FREE_SHARE * free:
        return f"{needed / 1e9:.0f} GB needed, and {free / 1e9:.0f} are free"
    return None


@contextlib.contextmanager
def limit_time(seconds: float) -> Iterator[None]:
    """Raise OutOfTime within after so many seconds, as soon as Python has its turn."""

    def stop(*signal_and_frame: Any) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def time_library(config: ModelConfig, device: torch.device, *, compiles: bool) -> list[Decoding]:
    """Bfloat16 by torch's own products and our attention, in graphs of ours."""
    model = build_model(config, "dense", dtype=torch.bfloat16, device=device)
    runner = open_runner(model, open_graphs(device), DEPTHS, compiles=compiles, block_tokens=BLOCK_TOKENS)
    return [time_decoding(runner, depth, BLOCK_TOKENS) for depth in DEPTHS]


def time_torch(config: ModelConfig, device: torch.device) -> list[Decoding]:
    """Bfloat16 by torch.compile alone, as it reduces overhead."""
    return [time_compiled(build_model(config, "dense", dtype=torch.bfloat16, device=device), "reduce-overhead")]


def time_torchao(config: ModelConfig, device: torch.device, *, kind: Literal["int4", "int8"]) -> list[Decoding]:
    """Weights quantized by torchao, the output layer's too, and steps compiled as it is fastest with."""
    config = replace(config, tie_word_embeddings=False)  # it quantizes no embedding
    model = build_model(config, "dense", dtype=torch.bfloat16, device=device)
    quantize_by_torchao(model, kind)
    with without_regions():
        return [time_compiled(model, "max-autotune")]


def quantize_by_torchao(model: nn.Module, kind: Literal["int4", "int8"]) -> None:
    """Have torchao take the place of all linear layers' weights: int8 per channel, or int4 as tinygemm reads it."""
    from torchao.quantization import (  # type: ignore[import-untyped]
        Int4WeightOnlyConfig,
        Int8WeightOnlyConfig,
        quantize_,
    )

    # It would else change the compiler's settings for whatever comes later.
    settings: Any = {"set_inductor_config": False}
    if kind == "int8":
        quantize_(model, Int8WeightOnlyConfig(**settings))
    else:
        settings |= {"group_size": TORCHAO_GROUP, "int4_packing_format": "tile_packed_to_4d"}
        quantize_(model, Int4WeightOnlyConfig(**settings))


@contextlib.contextmanager
def without_regions() -> Iterator[None]:
    """Within, blocks are compiled one by one: torch takes none of torchao's tensors into a region that they share."""
    forward = TransformerBlock.forward
    with patch.object(TransformerBlock, "forward", getattr(forward, "__marked_compile_region_fn__", forward)):
        yield


def choose_next(model: Transformer, token: Tensor, input_pos: Tensor, kv_pos: Tensor) -> Tensor:
    """The most likely token (1, 1) after one (1, 1); see `Transformer.forward`."""
    logits: Tensor = model(token, input_pos, kv_pos)
    return logits[:, -1].argmax(-1, keepdim=True)


def time_compiled(
    model: Transformer, mode: str, block_tokens: int = BLOCK_TOKENS, clock: Clock = time.perf_counter
) -> Decoding:
    """Blocks of tokens from an empty cache by a step that torch compiles, records and replays in that mode.

    Attention is torch's own, over as many slots as the blocks fill. The step is compiled in the first block, which
    does not count.
    """
    slots = (1 + BLOCKS) * block_tokens
    model.set_kernels(None)
    model.setup_caches(1, slots)
    step: Any = torch.compile(choose_next, mode=mode, fullgraph=True)
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    input_pos = torch.zeros(1, dtype=torch.int64, device=model.device)
    kv_pos = torch.arange(slots, device=model.device)
    blocks_ms = []
    for _ in range(1 + BLOCKS):
        start = clock()
        for _ in range(block_tokens):
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            # What a graph returns is overwritten by the next replay.
            token = step(model, token, input_pos, kv_pos).clone()
            input_pos += 1
        assert 0 <= int(token) < model.config.vocab_size  # waits for the block
        blocks_ms.append(1e3 * (clock() - start) / block_tokens)
    middle = block_tokens + BLOCKS * block_tokens // 2
    return Decoding(
        0,
        statistics.median(blocks_ms[1:]),
        tuple(blocks_ms[1:]),
        count_read_bytes(model, model.config, "tok_embeddings.weight"),
        middle * model.config.get_kv_bytes_per_token(model.dtype.itemsize),
    )


def count_read_bytes(model: nn.Module, config: ModelConfig, embedding: str) -> int:
    """Of weights, by a step: all but an embedding of that name that is not the output layer too."""
    return sum(
        count_stored_bytes(parameter)
        for name, parameter in model.named_parameters()
        if config.tie_word_embeddings or name != embedding
    )


def count_stored_bytes(values: Any) -> int:
    """Of a tensor, or of all that one of torchao's consists of, whose dtype is that of what it stands for."""
    if not hasattr(values, "__tensor_flatten__"):
        return int(values.nbytes)
    names, _ = values.__tensor_flatten__()
    return sum(count_stored_bytes(getattr(values, name)) for name in names)


def time_transformers(
    config: ModelConfig, device: torch.device, *, block_tokens: int = BLOCK_TOKENS, dtype: torch.dtype = torch.bfloat16
) -> list[Decoding]:
    """A model of that shape by transformers' `generate` with its static cache, for which it compiles on a GPU.

    Every block is a text of its own, and the first does not count.
    """
    model = build_transformers_model(config, device, dtype)
    prompt = torch.zeros(1, 1, dtype=torch.int64, device=device)
    blocks_ms = []
    for _ in range(1 + BLOCKS):
        clock = TokenClock()
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=block_tokens,
            do_sample=False,
            pad_token_id=0,
            cache_implementation="static",
            streamer=clock,
        )
        _, first, *rest = clock.times
        assert len(rest) == block_tokens - 1
        blocks_ms.append(1e3 * (rest[-1] - first) / len(rest))
    return [
        Decoding(
            0,
            statistics.median(blocks_ms[1:]),
            tuple(blocks_ms[1:]),
            count_read_bytes(model, config, "model.embed_tokens.weight"),
            block_tokens // 2 * config.get_kv_bytes_per_token(dtype.itemsize),
        )
    ]


def build_transformers_model(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Any:
    """Random weights in a Llama of transformers; its rotary frequencies, which cost the same, are the usual ones."""
    import transformers

    theirs: Any = transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.dim,
        intermediate_size=config.ffn_dim,
        num_hidden_layers=config.n_layers,
        num_attention_heads=config.n_heads,
        num_key_value_heads=config.n_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_seq_len,
        tie_word_embeddings=config.tie_word_embeddings,
    )
    auto: Any = transformers.AutoModelForCausalLM
    with device:
        model = auto.from_config(theirs, dtype=dtype)
    # Without an end-of-sequence token nothing but the length ends a text.
    model.generation_config.eos_token_id = None
    return model.eval()


LIBRARY = "bf16, torch's products in a graph of ours"
COMPILED = "bf16, compiled, in a graph of ours"
TORCH = "bf16, torch.compile reduce-overhead"
TORCHAO = {"int4": f"int4 g{TORCHAO_GROUP} by torchao, compiled", "int8": "int8 by torchao, compiled"}
LARGE, SMALL = "llama-3.1-8b", "llama-3.2-1b"


def describe_torchao(kind: Literal["int4", "int8"], preset: str, least_s: float) -> Baseline:
    """A baseline of torchao."""
    measure = partial(time_torchao, kind=kind)
    return Baseline(TORCHAO[kind], preset, measure, least_s, package="torchao", uses_torchs_graphs=True)


BASELINES = (
    Baseline(LIBRARY, LARGE, partial(time_library, compiles=False), least_s=10),
    Baseline(LIBRARY, SMALL, partial(time_library, compiles=False), least_s=6),
    Baseline(TORCH, SMALL, time_torch, least_s=20, uses_torchs_graphs=True),
    describe_torchao("int4", SMALL, least_s=20),
    describe_torchao("int8", SMALL, least_s=20),
    Baseline("bf16 by transformers, static cache", SMALL, time_transformers, 20, package="transformers"),
    Baseline(COMPILED, LARGE, partial(time_library, compiles=True), least_s=30),
    # All blocks of a model are one compiled region, so that many layers take little longer than one.
    Baseline(TORCH, LARGE, time_torch, least_s=30, uses_torchs_graphs=True),
    describe_torchao("int4", LARGE, least_s=30),
    describe_torchao("int8", LARGE, least_s=30),
)
"""The ones that matter most, and take least, first."""
