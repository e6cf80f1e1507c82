"""The model against a float64 reference, and against itself run in other steps.

Logits spread by 1 to 2 here; the order of float32 sums moves them by a few 1e-5, every mutation in
`MUTATIONS` by more than 1e-3, and the tolerance lies between.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given
from torch import Tensor

from gptfast.checkpoint import open_checkpoint
from gptfast.config import ModelConfig
from gptfast.download import peek_default_model
from gptfast.model import Transformer, build_attention_mask
from tests.reference.checkpoints import interleave_rotary, write_hf
from tests.reference.families import FAMILIES, random_tokens, random_weights
from tests.reference.gguf_files import read_gguf_weights
from tests.reference.model import reference_logits, rope_frequencies, visible_positions
from tests.reference.product import load, run

TOLERANCE = 1e-4
SHORT, LONG = 300, 1536
QUICK_LONG_FAMILIES = ("llama3-rope", "llama-linear-rope", "mistral", "qwen2")

Weights = dict[str, Tensor]
FamilyDirectory = Callable[[str], Path]


@cache
def expected_logits(family: str, length: int) -> Tensor:
    config = FAMILIES[family]
    return reference_logits(random_weights(config), config, random_tokens(config, length))


def assert_near(actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    assert actual.shape == expected.shape
    assert torch.isfinite(actual).all()
    assert (actual.double() - expected.double()).abs().max() < tolerance


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_the_float64_reference(family: str, family_directory: FamilyDirectory) -> None:
    model = load(family_directory(family), SHORT)
    logits = run(model, random_tokens(FAMILIES[family], SHORT))
    assert logits.dtype == torch.float32
    assert_near(logits, expected_logits(family, SHORT))


# Long enough to leave every sliding window and the original context of llama3 scaling.
@pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=[] if family in QUICK_LONG_FAMILIES else [pytest.mark.slow]) for family in FAMILIES],
)
def test_logits_equal_the_float64_reference_on_long_texts(family: str, family_directory: FamilyDirectory) -> None:
    model = load(family_directory(family), LONG)
    logits = run(model, random_tokens(FAMILIES[family], LONG), [512, 512, 512])
    assert_near(logits, expected_logits(family, LONG))


def test_random_weights_give_logits_that_spread() -> None:
    for family in FAMILIES:
        assert 1 < expected_logits(family, SHORT).std(dim=-1).mean() < 5


# What must make the comparison above fail; else it proves nothing.


def _interleaved_rows(weights: Weights, config: ModelConfig) -> tuple[Weights, ModelConfig]:
    return interleave_rotary(weights, config), config


def _rows_permuted_by_wrong_head_count(weights: Weights, config: ModelConfig) -> tuple[Weights, ModelConfig]:
    wrong = replace(config, n_kv_heads=config.n_heads // config.n_kv_heads)
    own = interleave_rotary(weights, wrong)
    return weights | {name: own[name] for name in own if "attention.wk" in name}, config


def _zero(kind: str) -> Callable[[Weights, ModelConfig], tuple[Weights, ModelConfig]]:
    def mutate(weights: Weights, config: ModelConfig) -> tuple[Weights, ModelConfig]:
        return {n: torch.zeros_like(t) if n.endswith(kind) else t for n, t in weights.items()}, config

    return mutate


def _unit(kind: str) -> Callable[[Weights, ModelConfig], tuple[Weights, ModelConfig]]:
    def mutate(weights: Weights, config: ModelConfig) -> tuple[Weights, ModelConfig]:
        return {n: torch.ones_like(t) if n.endswith(kind) else t for n, t in weights.items()}, config

    return mutate


def _kv_heads_swapped(weights: Weights, config: ModelConfig) -> tuple[Weights, ModelConfig]:
    def swap(tensor: Tensor) -> Tensor:
        return tensor.reshape(config.n_kv_heads, -1, *tensor.shape[1:]).flip(0).reshape(tensor.shape)

    return {n: swap(t) if "attention.wk" in n or "attention.wv" in n else t for n, t in weights.items()}, config


def _gate_and_up_swapped(weights: Weights, config: ModelConfig) -> tuple[Weights, ModelConfig]:
    w1, w3 = "layers.0.feed_forward.w1.weight", "layers.0.feed_forward.w3.weight"
    return weights | {w1: weights[w3], w3: weights[w1]}, config


def _with(**changes: object) -> Callable[[Weights, ModelConfig], tuple[Weights, ModelConfig]]:
    return lambda weights, config: (weights, replace(config, **changes))  # type: ignore[arg-type]


MUTATIONS = {
    "interleaved rotary rows": ("llama-8-2", _interleaved_rows),
    "k permuted by the wrong head count": ("llama-8-2", _rows_permuted_by_wrong_head_count),
    "key/value heads swapped": ("llama-32-4", _kv_heads_swapped),
    "gate and up swapped": ("llama-8-2", _gate_and_up_swapped),
    "q bias dropped": ("qwen2", _zero("wq.bias")),
    "k bias dropped": ("qwen2", _zero("wk.bias")),
    "v bias dropped": ("qwen2", _zero("wv.bias")),
    "o bias dropped": ("llama-bias", _zero("wo.bias")),
    "q norm ignored": ("qwen3", _unit("q_norm.weight")),
    "k norm ignored": ("qwen3", _unit("k_norm.weight")),
    "wrong eps": ("llama-tied", _with(norm_eps=1e-6)),
    "wrong rope base": ("llama-8-2", _with(rope_theta=10_000.0)),
    "llama3 scaling ignored": ("llama3-rope", _with(rope_scaling=None)),
    "linear scaling ignored": ("llama-linear-rope", _with(rope_scaling=None)),
    "sliding window ignored": ("mistral", _with(sliding_window=None)),
    "sliding window one too long": ("mistral", _with(sliding_window=49)),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_comparison_notices(mutation: str, tmp_path: Path) -> None:
    family, mutate = MUTATIONS[mutation]
    config = FAMILIES[family]
    weights, mutated_config = mutate(random_weights(config), config)
    model = load(write_hf(tmp_path / "mutated", weights, mutated_config), SHORT)
    logits = run(model, random_tokens(config, SHORT))
    assert (logits.double() - expected_logits(family, SHORT)).abs().max() > 10 * TOLERANCE


# The model against itself


@pytest.mark.parametrize("family", FAMILIES)
def test_cached_steps_equal_one_pass(family: str, family_directory: FamilyDirectory) -> None:
    model = load(family_directory(family), 128)
    tokens = random_tokens(FAMILIES[family], 110)
    uncached = run(model, tokens)
    assert_near(run(model, tokens, [1, 7, 64, 9]), uncached)


@pytest.mark.parametrize("family", ["llama-32-4", "mistral"])
@pytest.mark.parametrize("chunks", [[1] * 100, [100], [99], [33, 33, 33], [64, 32]])
def test_output_does_not_depend_on_chunking(family: str, chunks: list[int], family_directory: FamilyDirectory) -> None:
    model = load(family_directory(family), 128)
    tokens = random_tokens(FAMILIES[family], 100)
    assert_near(run(model, tokens, chunks), expected_logits(family, SHORT)[:100])


@pytest.mark.parametrize("family", ["llama-8-2", "mistral"])
@pytest.mark.parametrize("reserved", [100, 101, 128, 1000, 2048])
def test_output_does_not_depend_on_the_reserved_length(
    family: str, reserved: int, family_directory: FamilyDirectory
) -> None:
    model = load(family_directory(family), reserved)
    tokens = random_tokens(FAMILIES[family], 100)
    assert_near(run(model, tokens, [80]), expected_logits(family, SHORT)[:100])


@pytest.mark.parametrize("family", ["llama-8-2", "mistral"])
@pytest.mark.parametrize("attend", [100, 128, 512])
def test_output_does_not_depend_on_the_attended_slots(
    family: str, attend: int, family_directory: FamilyDirectory
) -> None:
    model = load(family_directory(family), 512)
    run(model, random_tokens(FAMILIES[family], 512, seed=1))  # what is in the slots must not matter
    tokens = random_tokens(FAMILIES[family], 100)
    assert_near(run(model, tokens, [80], attend=attend), expected_logits(family, SHORT)[:100])


@pytest.mark.parametrize("bucket", [81, 96, 128])
def test_output_does_not_depend_on_prompt_padding(bucket: int, family_directory: FamilyDirectory) -> None:
    model = load(family_directory("mistral"), 128)
    tokens = random_tokens(FAMILIES["mistral"], 100)
    padded = torch.tensor([tokens[:80] + [0] * (bucket - 80)])
    prompt = model(padded, torch.arange(bucket), torch.arange(bucket))[0, :80]
    steps = [model(torch.tensor([[tokens[p]]]), torch.tensor([p]), torch.arange(128))[0] for p in range(80, 100)]
    assert_near(torch.cat([prompt, *steps]), expected_logits("mistral", SHORT)[:100])


def test_the_last_slot_of_the_cache_is_usable(family_directory: FamilyDirectory) -> None:
    model = load(family_directory("llama-8-2"), 64)
    tokens = random_tokens(FAMILIES["llama-8-2"], 64)
    assert_near(run(model, tokens, [60]), expected_logits("llama-8-2", SHORT)[:64])


def test_rows_of_a_batch_are_independent(family_directory: FamilyDirectory) -> None:
    config = FAMILIES["qwen3"]
    texts = [random_tokens(config, 60, seed=seed) for seed in range(3)]
    positions = torch.arange(60)
    together = load(family_directory("qwen3"), 60, batch_size=3)(torch.tensor(texts), positions, positions)
    alone = load(family_directory("qwen3"), 60)
    for row, text in enumerate(texts):
        assert_near(together[row], run(alone, text))


def test_only_the_wanted_rows_are_computed(family_directory: FamilyDirectory) -> None:
    model = load(family_directory("llama-8-2"), 64)
    tokens = random_tokens(FAMILIES["llama-8-2"], 64)
    positions = torch.arange(64)
    logits = model(torch.tensor([tokens]), positions, positions, torch.tensor([63, 5]))
    assert_near(logits[0], expected_logits("llama-8-2", SHORT)[[63, 5]])


def test_the_past_within_the_window_is_all_that_counts(family_directory: FamilyDirectory) -> None:
    """After n_layers windows a changed first token can't reach the end; without a window it would."""
    config = FAMILIES["mistral"]
    assert config.sliding_window is not None
    tokens = random_tokens(config, 200)
    changed = [(tokens[0] + 1) % config.vocab_size, *tokens[1:]]
    model = load(family_directory("mistral"), 200)
    before, after = run(model, tokens), run(model, changed)
    reach = config.n_layers * (config.sliding_window - 1) + 1
    assert_near(after[reach:], before[reach:], tolerance=1e-6)
    assert (after[:reach] - before[:reach]).abs().amax(dim=-1).min() > 0


@given(start=st.integers(0, 300), size=st.integers(1, 256), filled=st.integers(1, 256), window=st.integers(1, 300))
@example(start=0, size=256, filled=140, window=16)
def test_every_row_of_the_mask_sees_its_token_and_padding_what_the_last_one_sees(
    start: int, size: int, filled: int, window: int
) -> None:
    """A row that is wholly masked is NaN to some attention kernels, and padding may lie beyond all windows."""
    length = start + min(filled, size)
    for sliding_window in (None, window):
        mask = build_attention_mask(
            torch.arange(start, start + size), torch.arange(length), sliding_window, torch.float32
        )
        assert mask.shape == (size, length)
        assert set(mask.unique().tolist()) <= {0.0, -math.inf}
        expected = visible_positions(length, sliding_window)[start:]
        assert torch.equal(mask[: length - start] == 0, expected)
        assert torch.equal(mask[length - start :] == 0, expected[-1:].expand(start + size - length, -1))
        assert (mask == 0).any(dim=-1).all()


# A real model

DEFAULT_MODEL_CONFIG = ModelConfig(
    architecture="llama",
    dim=576,
    n_layers=30,
    n_heads=9,
    n_kv_heads=3,
    head_dim=64,
    ffn_dim=1536,
    vocab_size=49_152,
    max_seq_len=8192,
    norm_eps=9.999999747378752e-06,
    rope_theta=100_000.0,
    tie_word_embeddings=True,
)
# "The Roman Empire was founded in" and what transformers makes of it in float32 and bfloat16 alike, greedily.
PROMPT = [504, 1463, 282, 260, 4469, 7057, 5634, 351]
CONTINUATION = [
    260, 14465, 282, 7268, 281, 216, 39, 37, 35, 15023, 411, 7810, 16884, 29465, 30, 7268,
    436, 3251, 347, 253, 4469, 2240, 29, 3595, 28, 284, 624, 14465, 6877, 314, 5076, 11812,
    288, 260, 4469, 7057, 30, 378, 4469, 7057, 436, 7498, 411, 7810, 16884, 29465, 28, 617,
    10832, 7268, 429, 216, 39, 37, 35, 288, 216, 37, 32, 41, 15023, 30, 378, 4469,
]  # fmt: skip


@pytest.mark.slow
def test_the_default_model_equals_the_float64_reference() -> None:
    path = peek_default_model()
    if path is None:
        pytest.skip("the default model is not in the cache; `gptfast download` fetches it")
    assert open_checkpoint(path).config == DEFAULT_MODEL_CONFIG
    logits = run(load(path, 72), PROMPT + CONTINUATION, [8])
    assert logits.argmax(dim=-1)[7:-1].tolist() == CONTINUATION
    expected = reference_logits(
        read_gguf_weights(path, DEFAULT_MODEL_CONFIG), DEFAULT_MODEL_CONFIG, PROMPT + CONTINUATION
    )
    assert_near(logits, expected, tolerance=1e-3)  # logits as large as 30


# Long contexts in bfloat16


def _bf16_error_late_against_early(model: Transformer, expected: Tensor, tokens: list[int]) -> float:
    error = (run(model, tokens, [500] * 8) - expected).abs().mean(dim=-1)
    return float(error[2000:].mean() / error[100:500].mean())


def test_bf16_does_not_drift_with_the_position(family_directory: FamilyDirectory) -> None:
    config = FAMILIES["llama-8-2"]
    tokens = random_tokens(config, 4000)
    expected = run(load(family_directory("llama-8-2"), 4000), tokens, [500] * 8)
    model = load(family_directory("llama-8-2"), 4000, dtype=torch.bfloat16)
    assert (run(model, tokens, [500] * 8)[2000:] - expected[2000:]).abs().mean() < 0.1
    assert _bf16_error_late_against_early(model, expected, tokens) < 1.3

    # Angles rounded to bfloat16 are the fault that this looks for: it must show.
    angles = (torch.arange(4000)[:, None] * rope_frequencies(config)).to(torch.bfloat16).double()
    model.rope_cos, model.rope_sin = angles.cos().float(), angles.sin().float()
    assert _bf16_error_late_against_early(model, expected, tokens) > 1.3
