"""What a model computes from weights of every precision, against the float64 reference with those same weights.

Exactly means without rounding activations: then only the order of float32 sums differs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gptfast.checkpoint import open_checkpoint
from gptfast.config import ModelConfig
from gptfast.errors import UserError
from gptfast.kernels import ops
from gptfast.kernels.ops import Kernels
from gptfast.loading import WEIGHTS, Weights, estimate_weight_bytes
from gptfast.quantization import FLOAT8, WeightScheme
from gptfast.rounding import round_to_nearest
from gptfast.session import Session, load
from quantize.convert import Settings, convert
from quantize.plan import list_default_rules, make_plan
from tests.reference.checkpoints import write_hf
from tests.reference.families import FAMILIES, WIDE, random_tokens, random_weights
from tests.reference.gguf_files import write_gguf
from tests.reference.model import reference_logits
from tests.reference.sessions import tiny_config
from tests.reference.tokenizers import train_byte_level, write_tokenizer

pytestmark = pytest.mark.usefixtures("tiny_cache")

LENGTH = 48
TOLERANCE = 1e-4
"""Of logits that spread by 1 to 5; the reference says what moves them by how much."""
EXACT = {"dtype": "float32", "activations": "fp32"}
INT8_PER_CHANNEL, INT4_GROUPS = WeightScheme(8, None), WeightScheme(4, 32)
VOCAB_SIZE = tiny_config().vocab_size
CONFIGS = {
    "apart": replace(FAMILIES["llama-8-2"], vocab_size=VOCAB_SIZE),
    "tied": replace(FAMILIES["llama-tied"], vocab_size=VOCAB_SIZE),
    "biases": replace(FAMILIES["llama-bias"], vocab_size=VOCAB_SIZE),
    # Nothing here is a multiple of 32, nor of the 16 rows that the kernels take at once.
    "odd": replace(FAMILIES["llama-8-2"], dim=40, n_heads=5, n_kv_heads=1, ffn_dim=88, vocab_size=VOCAB_SIZE),
}
QUERY, KEY, VALUE = (f"layers.0.attention.w{letter}.weight" for letter in "qkv")


@pytest.fixture(params=[True, False], ids=["kernels", "expanded"])
def has_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """With the CPU kernels, and as on a machine that has no compiler for them."""
    if not request.param:
        monkeypatch.setattr(ops, "has_cpu_kernels", lambda: False)
    return bool(request.param)


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    written: dict[str, Path] = {}

    def write_once(name: str) -> Path:
        if name not in written:
            written[name] = write_model(tmp_path_factory.mktemp(name), CONFIGS[name])
        return written[name]

    return write_once


def write_model(directory: Path, config: ModelConfig, dtype: torch.dtype = torch.float32) -> Path:
    return write_tokenizer(write_hf(directory, random_weights(config), config, dtype=dtype), train_byte_level())


def round_weights(weights: Mapping[str, Tensor], config: ModelConfig, precision: str) -> dict[str, Tensor]:
    """What `--weights PRECISION` makes of weights that are stored in float32."""
    rounded = dict(weights)
    head = "tok_embeddings.weight" if config.tie_word_embeddings else "output.weight"
    for name, weight in weights.items():
        if weight.dim() == 1 or precision in ("stored", "fp32"):
            continue
        if precision == "bf16":
            rounded[name] = weight.bfloat16().float()
        elif name == head or name != "tok_embeddings.weight":
            scheme = FLOAT8 if precision == "fp8" and name != head else None
            if precision == "int4" and name != head and weight.shape[1] % 32 == 0:
                scheme = INT4_GROUPS
            rounded[name] = round_to_nearest(weight, scheme or INT8_PER_CHANNEL, name=name).dequantize()
    return rounded


def assert_computes(session: Session, weights: Mapping[str, Tensor], tolerance: float = TOLERANCE) -> None:
    """The logits after every token are those of these weights, whether tokens are read at once or one by one."""
    config = session.runner.model.config
    tokens = random_tokens(config, LENGTH)
    expected = reference_logits(weights, config, tokens)
    read = session.runner.score(tokens[:40])
    decoded = torch.cat([session.runner.decode(torch.tensor([tokens[i]]), i) for i in range(40, LENGTH)])
    difference = (torch.cat([read, decoded]).double() - expected).abs().max()
    assert difference < tolerance * max(1.0, float(expected.std()))


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("precision", WEIGHTS)
def test_logits_are_those_of_the_weights_as_they_are_held(
    precision: str, config: str, has_kernels: bool, write: Callable[[str], Path]
) -> None:
    session = load(write(config), weights=precision, **EXACT)
    assert_computes(session, round_weights(random_weights(CONFIGS[config]), CONFIGS[config], precision))


def test_every_rounding_is_one_that_the_reference_would_notice(write: Callable[[str], Path]) -> None:
    """Else the test above proves nothing."""
    session = load(write("apart"), **EXACT)
    weights = random_weights(CONFIGS["apart"])
    for precision in ("bf16", "fp8", "int8", "int4"):
        with pytest.raises(AssertionError):
            assert_computes(session, round_weights(weights, CONFIGS["apart"], precision))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_weights_stored_in_half_the_bytes_stay_so(stored: torch.dtype, tmp_path: Path, has_kernels: bool) -> None:
    config = CONFIGS["apart"]
    session = load(write_model(tmp_path / "model", config, stored), **EXACT)
    assert_computes(session, {name: weight.to(stored).float() for name, weight in random_weights(config).items()})
    if has_kernels:
        assert session.weights == str(stored).removeprefix("torch.")


@pytest.mark.parametrize("config", ["apart", "tied", "odd"])
def test_rounded_activations_move_the_logits_a_little(config: str, write: Callable[[str], Path]) -> None:
    exact = load(write(config), weights="int8", **EXACT)
    rounded = load(write(config), weights="int8", dtype="float32")
    assert (exact.activations, rounded.activations) == ("fp32", "int8")
    tokens = random_tokens(CONFIGS[config], LENGTH)
    expected = exact.runner.score(tokens)
    difference = (rounded.runner.score(tokens) - expected).std() / expected.std()
    assert 1e-4 < difference < 0.05


@pytest.mark.parametrize("stored", ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K", "BF16"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_a_gguf_file_is_decoded_from_its_own_blocks(
    stored: str, is_tied: bool, tmp_path: Path, has_kernels: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = replace(WIDE, tie_word_embeddings=is_tied)
    weights = write_gguf(tmp_path / "model.gguf", random_weights(config), config, types=stored)
    with caplog.at_level(logging.INFO, "gptfast"):
        session = load(tmp_path / "model.gguf", **EXACT)
    assert_computes(session, weights)
    assert "no kernel" not in caplog.text
    if has_kernels:
        assert session.weights == {"BF16": "bfloat16"}.get(stored, stored)


def test_a_projection_of_several_formats_has_a_product_for_each(tmp_path: Path, has_kernels: bool) -> None:
    """As in Q4_K_M files, where some value and down projections have six bits."""
    weights = random_weights(WIDE)
    types = dict.fromkeys(weights, "Q4_K") | {VALUE: "Q6_K", "layers.0.feed_forward.w2.weight": "Q6_K"}
    types["output.weight"] = "Q6_K"
    expanded = write_gguf(tmp_path / "model.gguf", weights, WIDE, types=types)
    session = load(tmp_path / "model.gguf", **EXACT)
    assert_computes(session, expanded)
    if has_kernels:
        assert session.weights in ("Q4_K + Q6_K", "Q6_K + Q4_K")
        assert len(session.runner.model.layers[0].attention.wqkv.list_matrices()) == 2  # type: ignore[operator, union-attr]


def test_neighbours_of_one_format_are_joined_and_others_kept_in_their_order(tmp_path: Path) -> None:
    types = {QUERY: "Q8_0", KEY: "Q4_0", VALUE: "Q8_0"}
    expanded = write_gguf(tmp_path / "model.gguf", random_weights(WIDE), WIDE, types=types)
    session = load(tmp_path / "model.gguf", **EXACT)
    assert_computes(session, expanded)
    wqkv = session.runner.model.layers[0].attention.wqkv
    assert [precision for precision, _ in wqkv.list_matrices()] == ["Q8_0", "Q4_0", "Q8_0"]  # type: ignore[operator, union-attr]


def test_types_without_a_kernel_are_expanded_with_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    types = dict.fromkeys(random_weights(WIDE), "Q5_0") | {"layers.0.feed_forward.w2.weight": "Q5_1"}
    weights = write_gguf(tmp_path / "model.gguf", random_weights(WIDE), WIDE, types=types)
    with caplog.at_level(logging.INFO, "gptfast"):
        session = load(tmp_path / "model.gguf", **EXACT)
    lines = [record.getMessage() for record in caplog.records if "no kernel" in record.getMessage()]
    assert lines == ["weights stored as Q5_0, Q5_1 have no kernel and are expanded to float32"]
    assert session.weights == "float32"
    assert_computes(session, weights)


def test_weights_rounded_to_fp8_are_expanded_on_a_cpu_to_the_bit_with_one_line(
    tmp_path: Path, has_kernels: bool, caplog: pytest.LogCaptureFixture
) -> None:
    weights = random_weights(CONFIGS["apart"])
    source = write_model(tmp_path / "source", CONFIGS["apart"], torch.bfloat16)
    rounded = {name: weight.bfloat16().float() for name, weight in weights.items()}
    for name, weight in rounded.items():
        if name.startswith("layers.") and weight.dim() == 2:
            rounded[name] = round_to_nearest(weight, FLOAT8).dequantize()
    rounded["output.weight"] = round_to_nearest(rounded["output.weight"], INT8_PER_CHANNEL).dequantize()
    expanded = write_tokenizer(write_hf(tmp_path / "expanded", rounded, CONFIGS["apart"]), train_byte_level())
    with caplog.at_level(logging.INFO, "gptfast"):
        session = load(source, weights="fp8", **EXACT)
    lines = [record.getMessage() for record in caplog.records if "fp8" in record.getMessage()]
    said = ["weights stored as BF16 are rounded to fp8 channel, and expanded to float32 as that has no kernel here"]
    assert lines == (said if has_kernels else [])
    if has_kernels:
        assert session.weights == "float32 + int8 channel"
    dense = load(expanded, **EXACT)
    for layer, other in zip(session.runner.model.layers, dense.runner.model.layers, strict=True):
        for one, two in zip(layer.parameters(), other.parameters(), strict=True):  # type: ignore[operator]
            assert torch.equal(one, two)


def test_a_file_of_fp8_is_what_fp8_makes_of_its_source_and_is_not_rounded_again(
    tmp_path: Path, has_kernels: bool, caplog: pytest.LogCaptureFixture
) -> None:
    source = write_model(tmp_path / "source", CONFIGS["apart"], torch.bfloat16)
    checkpoint = open_checkpoint(source)
    plan = make_plan(checkpoint, FLOAT8, list_default_rules(FLOAT8))
    convert(checkpoint, tmp_path / "fp8", plan, Settings("fp8", FLOAT8), lambda name: None)
    tokens = random_tokens(CONFIGS["apart"], LENGTH)
    expected = load(source, weights="fp8", **EXACT).runner.score(tokens)
    with caplog.at_level(logging.INFO, "gptfast"):
        for weights in ("stored", "fp8"):
            caplog.clear()
            assert torch.equal(load(tmp_path / "fp8", weights=weights, **EXACT).runner.score(tokens), expected)
            lines = [record.getMessage() for record in caplog.records if "weights stored" in record.getMessage()]
            said = ["weights stored as fp8 channel have no kernel and are expanded to float32"]
            assert lines == (said if has_kernels else [])


@pytest.mark.parametrize(("kernels", "bytes_more"), [("cpp", 3), ("triton", 0)])
def test_the_estimate_of_fp8_knows_who_has_a_kernel_for_it(
    kernels: Kernels, bytes_more: int, write: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside int8, with the head of both in int8; where there is none it is held in float32."""
    monkeypatch.setattr("gptfast.loading.choose_kernels", lambda _: kernels)
    checkpoint = open_checkpoint(write("apart"))
    dtype = torch.float32 if kernels == "cpp" else torch.bfloat16
    choices: tuple[Weights, ...] = ("fp8", "int8")
    fp8, int8 = (estimate_weight_bytes(checkpoint, choice, dtype, torch.device("cpu")) for choice in choices)
    weights = random_weights(CONFIGS["apart"])
    blocks = sum(weight.numel() for name, weight in weights.items() if name.startswith("layers.") and weight.dim() == 2)
    assert fp8 - int8 == bytes_more * blocks


def test_quantized_weights_can_be_rounded_again(tmp_path: Path) -> None:
    weights = write_gguf(tmp_path / "model.gguf", random_weights(WIDE), WIDE, types="Q8_0")
    session = load(tmp_path / "model.gguf", weights="int4", **EXACT)
    assert session.weights == "int4 g32 + int8 channel"
    assert_computes(session, round_weights(weights, WIDE, "int4"))


@pytest.mark.parametrize("weights", ["fp32", "int8"])
def test_a_batch_decodes_as_its_rows_alone(weights: str, write: Callable[[str], Path]) -> None:
    """Up to the bit: no row's products depend on the rows beside it."""
    alone, batch = (load(write("apart"), dtype="float32", weights=weights, batch_size=rows) for rows in (1, 3))
    prompt, next_tokens = random_tokens(CONFIGS["apart"], 20), [5, 6, 7]
    batch.runner.prefill(prompt)
    together = batch.runner.decode(torch.tensor(next_tokens), 20)
    alone.runner.prefill(prompt)
    for row, token in enumerate(next_tokens):
        assert torch.equal(alone.runner.decode(torch.tensor([token]), 20)[0], together[row])


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_token_read_with_others_has_the_logits_that_it_has_alone(weights: str, write: Callable[[str], Path]) -> None:
    """Up to the bit in eager steps with rounded activations, whose sums are of integers."""
    session = load(write("apart"), dtype="float32", weights=weights)
    tokens = random_tokens(CONFIGS["apart"], 30)
    together = session.runner.score(tokens)
    for position, token in enumerate(tokens):
        assert torch.equal(session.runner.decode(torch.tensor([token]), position)[0], together[position])


# Keys and values


@pytest.mark.parametrize(("kv_dtype", "most"), [("bf16", 0.02), ("int8", 0.03)])
@pytest.mark.parametrize("config", ["apart", "odd"])
def test_smaller_keys_and_values_move_the_logits_a_little(
    kv_dtype: str, most: float, config: str, has_kernels: bool, write: Callable[[str], Path]
) -> None:
    tokens = random_tokens(CONFIGS[config], LENGTH)
    exact, smaller = (load(write(config), kv_dtype=name, **EXACT) for name in ("fp32", kv_dtype))
    expected = exact.runner.score(tokens)
    difference = (smaller.runner.score(tokens) - expected).std() / expected.std()
    assert 1e-5 < difference < most


@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "int8"])
def test_a_cache_that_grows_keeps_what_it_holds_and_its_scales(
    kv_dtype: str, has_kernels: bool, write: Callable[[str], Path]
) -> None:
    tokens = random_tokens(CONFIGS["apart"], LENGTH)
    session = load(write("apart"), kv_dtype=kv_dtype, **EXACT)
    session.runner.prefill(tokens[:-1])
    usual = session.runner.decode(torch.tensor(tokens[-1:]), LENGTH - 1)
    before = session.runner.capacity
    session.runner.reserve(before + 1)
    assert session.runner.capacity > before
    grown = session.runner.decode(torch.tensor(tokens[-1:]), LENGTH - 1)
    assert torch.allclose(grown, usual, atol=1e-5)


@pytest.mark.parametrize(("kv_dtype", "element_bytes", "scale_bytes"), [("fp32", 4, 0), ("bf16", 2, 0), ("int8", 1, 4)])
def test_bytes_of_a_token_are_those_of_its_keys_values_and_scales(
    kv_dtype: str, element_bytes: int, scale_bytes: int, write: Callable[[str], Path]
) -> None:
    config = CONFIGS["apart"]
    runner = load(write("apart"), kv_dtype=kv_dtype, batch_size=2).runner
    per_head = config.head_dim * element_bytes + scale_bytes
    assert runner.kv_bytes_per_token == 2 * config.n_layers * config.n_kv_heads * per_head
    held = [buffer for cache in runner.model.list_caches() for buffer in cache.buffers()]
    slots = held[0].shape[2]
    assert sum(buffer.nbytes for buffer in held) == 2 * slots * runner.kv_bytes_per_token


def test_weights_larger_than_the_free_memory_are_refused_by_the_precision_asked_for(
    write: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gptfast.loading.get_available_memory", lambda _: 400_000)
    load(write("apart"), weights="int4", dtype="float32")
    with pytest.raises(UserError, match="GB are free on cpu; use a smaller model or --weights int4"):
        load(write("apart"), weights="fp32", dtype="float32")
