"""What a benchmark found, with units in the names: the tables, JSON, CSV and plots are made of these alone.

GB is 1e9 bytes. A step extends every row of the batch by one token.
"""

from __future__ import annotations

from dataclasses import dataclass

from gptfast.bench.environment import Environment
from gptfast.bench.statistics import Latency, Spread
from gptfast.config import SamplingConfig
from gptfast.runner import CompileKind
from gptfast.session import StepName


@dataclass(frozen=True)
class ModelFacts:
    """What was measured.

    Attributes:
        name: the checkpoint's file or directory, or the preset.
        random_weights: whether the weights were drawn and not read.
        parameters: how many the model has; a tied head counts once.
        dtype: what activations are computed in.
        weights, activations, kv_dtype: as `Session` describes them.
        weight_bytes_per_token: weights and scales that a step reads, each once.
        kv_bytes_per_token: keys and values that one token of one row adds to the cache, in all layers.
    """

    name: str
    random_weights: bool
    parameters: int
    dtype: str
    weights: str
    activations: str
    kv_dtype: str
    weight_bytes_per_token: int
    kv_bytes_per_token: int

    @property
    def precision(self) -> str:
        """The dtype and what differs from it; see `describe_precision`."""
        return describe_precision(self.dtype, self.weights, self.activations, self.kv_dtype)


def describe_precision(dtype: str, weights: str, activations: str, kv_dtype: str) -> str:
    """What a session computes in, in words: `float32, Q4_1 weights, int8 activations, bfloat16 cache`.

    What is as the dtype says is not said again.
    """
    parts = [
        dtype,
        *([f"{weights} weights"] if weights != dtype else []),
        *([f"{activations} activations"] if activations == "int8" else []),
        *([f"{kv_dtype} cache"] if kv_dtype != dtype else []),
    ]
    return ", ".join(parts)


@dataclass(frozen=True)
class Settings:
    """What the benchmark was asked for.

    Attributes:
        batch_size: rows decoded at once.
        repeats: counted runs of each measurement, which take turns.
        new_tokens: steps of one decode run.
        prompt_lengths: tokens of the prompts that prefill was measured with.
        depths: tokens in the cache before a decode run's first step.
        temperature, top_k, top_p: how the end-to-end runs sample.
    """

    batch_size: int
    repeats: int
    new_tokens: int
    prompt_lengths: tuple[int, ...]
    depths: tuple[int, ...]
    temperature: float
    top_k: int | None
    top_p: float

    @property
    def sampling(self) -> SamplingConfig:
        """How the end-to-end runs sample; raises UserError for what it cannot be."""
        return SamplingConfig(self.temperature, self.top_k, self.top_p)


@dataclass(frozen=True)
class Execution:
    """How the steps were executed.

    Attributes:
        compiled: whether compiled steps ran.
        compile_kind: as `Runner.compile_kind`.
        kernels, step: as those of `Session`.
        cuda_graphs: whether steps were really replayed as CUDA graphs.
        recompiles: compilations seen while measuring; anything but 0 spoils the figures.
        other_load: share of all processors' time that other processes, or the host, used during the runs; None where
            the system does not tell.
    """

    compiled: bool
    compile_kind: CompileKind
    kernels: str
    step: StepName
    cuda_graphs: bool
    recompiles: int
    other_load: float | None


@dataclass(frozen=True)
class Phases:
    """Where the wall-clock time of the benchmark itself went, in seconds; `other_s` is what no phase claims."""

    import_s: float
    load_s: float
    compile_s: float
    probe_s: float
    warm_up_s: float
    prefill_s: float
    decode_s: float
    end_to_end_s: float
    breakdown_s: float
    other_s: float
    wall_s: float


@dataclass(frozen=True)
class Bandwidth:
    """What the memory gives: plain reads by the run's own threads, before and after the runs.

    Attributes:
        probe_bytes: size of the buffer that they go through.
        before_gb_per_s, after_gb_per_s: over the reads of each probe.
        ceiling_gb_per_s: the higher of both medians, so that no share is flattered.
        drift: how far the lower median lies below the higher, as a fraction of it.
    """

    probe_bytes: int
    before_gb_per_s: Spread
    after_gb_per_s: Spread
    ceiling_gb_per_s: float
    drift: float


@dataclass(frozen=True)
class PrefillResult:
    """Reading a prompt into an empty cache.

    Attributes:
        prompt_tokens: its length.
        tokens_per_s: of the steps alone.
        ttft_s: from the call to the first token's text: checking the prompt, steps, sampling, detokenization.
    """

    prompt_tokens: int
    tokens_per_s: Spread
    ttft_s: Spread


@dataclass(frozen=True)
class DecodeResult:
    """Decoding from a cache that holds `depth` tokens.

    Attributes:
        depth: tokens in the cache before the first step of a run.
        tokens_per_s: of the steps alone, all rows together.
        step: times of single steps.
        end_to_end_tokens_per_s: with sampling, detokenization and the loop around them, all rows together.
        token: times of single turns of that loop.
        kv_bytes_per_step: keys and values that a step reads, each once, in the middle of the run.
        bytes_per_step: those and the weights.
        floor_ms: what `bytes_per_step` take at the measured ceiling.
        gb_per_s: `bytes_per_step` over the median step.
        share: `floor_ms` over the median step.
    """

    depth: int
    tokens_per_s: Spread
    step: Latency
    end_to_end_tokens_per_s: Spread
    token: Latency
    kv_bytes_per_step: int
    bytes_per_step: int
    floor_ms: float
    gb_per_s: float
    share: float


@dataclass(frozen=True)
class StepPart:
    """One part of a step: how long it takes, and the bytes of weights and cache that it must read."""

    name: str
    ms: float
    bytes_read: int


@dataclass(frozen=True)
class Breakdown:
    """Where the time of a decode step with sampling goes.

    Attributes:
        depth: tokens in the cache.
        step_ms: the median of whole steps, measured without looking inside.
        parts: they add up to `step_ms`; `unaccounted`, which may be negative, is what looking inside added or missed.
    """

    depth: int
    step_ms: float
    parts: tuple[StepPart, ...]


@dataclass(frozen=True)
class Memory:
    """Bytes held when the runs were over, and at most, by the process and on CUDA of the GPU; without the probes."""

    resident_bytes: int | None
    peak_resident_bytes: int
    device_peak_bytes: int | None

    def cover(self, earlier: Memory) -> Memory:
        """What is held here, and the peaks of both."""
        device_peaks = [peak for peak in (self.device_peak_bytes, earlier.device_peak_bytes) if peak is not None]
        return Memory(
            resident_bytes=self.resident_bytes,
            peak_resident_bytes=max(self.peak_resident_bytes, earlier.peak_resident_bytes),
            device_peak_bytes=max(device_peaks, default=None),
        )


@dataclass(frozen=True)
class BenchmarkResult:
    """All of one benchmark; `notes` are sentences that a reader of the figures must know."""

    date: str
    environment: Environment
    model: ModelFacts
    settings: Settings
    execution: Execution
    phases: Phases
    bandwidth: Bandwidth
    prefill: tuple[PrefillResult, ...]
    decode: tuple[DecodeResult, ...]
    breakdown: Breakdown | None
    memory: Memory
    notes: tuple[str, ...]
