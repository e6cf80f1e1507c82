from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gptfast.checkpoint.presets import PRESETS
from gptfast.inspection import (
    InspectionError,
    MemoryEstimate,
    ParameterAccount,
    count_parameters,
    estimate_memory,
    parse_size,
)
from gptfast.model import Transformer

LLAMA_3_8B = PRESETS["llama-3-8b"]


def count(account: ParameterAccount, name: str) -> tuple[int, int]:
    """Parameters of the component `name` per block and in the whole model."""
    (component,) = [part for part in account.components if part.name == name]
    return component.count, account.count_all(component)


@pytest.mark.parametrize("name", ["llama-3-8b", "llama-3.1-8b"])
def test_account_of_llama_3_8b_is_metas(name: str) -> None:
    account = count_parameters(PRESETS[name])
    assert count(account, "attention.wq") == (16_777_216, 536_870_912)
    assert count(account, "attention.wo") == (16_777_216, 536_870_912)
    assert count(account, "attention.wk") == (4_194_304, 134_217_728)
    assert count(account, "attention.wv") == (4_194_304, 134_217_728)
    assert account.count_in_block("attention.") == 41_943_040
    assert account.count_in_block("attention.") * 32 == 1_342_177_280
    for weight in ("w1", "w2", "w3"):
        assert count(account, f"feed_forward.{weight}")[0] == 14_336 * 4096
    assert count(account, "tok_embeddings")[1] == count(account, "output")[1] == 128_256 * 4096
    assert account.total == 8_030_261_248


@pytest.mark.parametrize("name", PRESETS)
def test_account_equals_the_modules_own_count(name: str) -> None:
    config = dataclasses.replace(PRESETS[name], n_layers=2)
    with torch.device("meta"):
        module = Transformer(config)
    assert count_parameters(config).total == sum(parameter.numel() for parameter in module.parameters())


def test_account_counts_an_output_bias() -> None:
    config = dataclasses.replace(LLAMA_3_8B, n_layers=2, output_bias=True)
    with torch.device("meta"):
        module = Transformer(config)
    assert count_parameters(config).total == sum(parameter.numel() for parameter in module.parameters())


def estimate(available_bytes: int, precision: str) -> MemoryEstimate:
    estimates = {each.precision: each for each in estimate_memory(LLAMA_3_8B, available_bytes)}
    return estimates[precision]


def test_weight_bytes_by_hand() -> None:
    total = 8_030_261_248
    kept = 128_256 * 4096 + 65 * 4096  # embeddings and norms
    quantized = total - kept
    rows = 32 * (4096 + 1024 + 1024 + 4096 + 14_336 + 4096 + 14_336) + 128_256
    assert estimate(0, "float32").weight_bytes == 4 * total
    assert estimate(0, "bfloat16").weight_bytes == 2 * total
    head = 128_256 * (4096 + 2)
    assert estimate(0, "int8 per channel").weight_bytes == quantized + 2 * rows + 2 * kept
    blocks = quantized - 128_256 * 4096
    assert estimate(0, "fp8 per channel").weight_bytes == blocks + 4 * (rows - 128_256) + head + 2 * kept
    assert estimate(0, "int4 group 32").weight_bytes == blocks * 9 // 16 + head + 2 * kept  # 4.5 bits each


def test_a_tied_embedding_is_counted_once_as_the_output_layer() -> None:
    config = PRESETS["smollm2-135m"]
    blocks = 30 * (2 * 576 * 576 + 2 * 192 * 576 + 3 * 1536 * 576)
    head = config.vocab_size * 576
    norms = 134_515_008 - blocks - head
    sizes = {each.precision: each.weight_bytes for each in estimate_memory(config, 0)}
    assert sizes["int4 group 32"] == blocks * 9 // 16 + head + 2 * config.vocab_size + 2 * norms


def test_kv_cache_of_llama_3_8b_is_128_kib_per_token() -> None:
    assert LLAMA_3_8B.get_kv_bytes_per_token(2) == 128 * 1024
    assert estimate(0, "float32").kv_bytes_per_token == 128 * 1024
    assert estimate(0, "int4 group 32").kv_bytes_per_token == 128 * 1024


def test_keys_and_values_of_int8_have_a_scale_for_each_head() -> None:
    by_dtype = {name: estimate_memory(LLAMA_3_8B, 0, kv_dtype=name)[0].kv_bytes_per_token for name in ("fp32", "int8")}
    assert by_dtype == {"fp32": 256 * 1024, "int8": 2 * 32 * 8 * (128 + 4)}


def test_an_unknown_kv_dtype_is_refused() -> None:
    with pytest.raises(InspectionError, match=r"'int3' is not supported; use .*bf16"):
        estimate_memory(LLAMA_3_8B, 0, kv_dtype="int3")


def test_context_is_limited_by_the_model_the_memory_or_the_weights() -> None:
    weights, per_token = 2 * 8_030_261_248, 128 * 1024
    assert estimate(weights + 8192 * per_token, "bfloat16").limited_by == "model"
    assert estimate(10**15, "bfloat16").max_context_tokens == 8192
    short = estimate(weights + 8191 * per_token, "bfloat16")
    assert (short.max_context_tokens, short.limited_by) == (8191, "memory")
    none = estimate(weights + per_token - 1, "bfloat16")
    assert (none.max_context_tokens, none.limited_by) == (0, "weights")


@given(available_bytes=st.integers(0, 2**40), name=st.sampled_from(sorted(PRESETS)))
def test_context_fits_and_no_longer_one_does(available_bytes: int, name: str) -> None:
    config = PRESETS[name]
    for each in estimate_memory(config, available_bytes):
        taken = each.weight_bytes + each.max_context_tokens * each.kv_bytes_per_token
        if each.limited_by != "weights":
            assert taken <= available_bytes
        if each.limited_by == "model":
            assert each.max_context_tokens == config.max_seq_len
        else:
            assert taken + each.kv_bytes_per_token > available_bytes


def test_stored_bytes_come_first() -> None:
    first, *others = estimate_memory(PRESETS["smollm2-135m"], 2**30, stored_bytes=96_000_000)
    assert (first.precision, first.weight_bytes) == ("as stored", 96_000_000)
    assert first.bits_per_weight == pytest.approx(8 * 96_000_000 / 134_515_008)
    assert len(others) == 5


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("24GiB", 24 * 2**30),
        ("1.5 GB", 1_500_000_000),
        (" 512MiB ", 512 * 2**20),
        ("80 mb", 80_000_000),
        ("123bytes", 123),
    ],
)
def test_parse_size(text: str, expected: int) -> None:
    assert parse_size(text) == expected


@given(st.integers(1, 10**6))
def test_parse_size_of_whole_units(number: int) -> None:
    assert parse_size(f"{number}MiB") == number * 2**20


@pytest.mark.parametrize(
    "text", ["24", "24G", "GiB", "-1GiB", "0GB", "1e3GiB", "1,5GB", "24 TB", "", "nan GB", "9" * 400 + "GiB"]
)
def test_parse_size_refuses(text: str) -> None:
    with pytest.raises(InspectionError, match=r"GiB, GB, MiB, MB or bytes") as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)
