from __future__ import annotations

import dataclasses
from pathlib import Path

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
    get_available_memory,
    get_kv_bytes_per_token,
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
    assert estimate(0, "int8 per channel").weight_bytes == quantized + 2 * rows + 2 * kept
    assert estimate(0, "int4 group 32").weight_bytes == quantized * 5 // 8 + 2 * kept


def test_tied_output_is_counted_once_and_not_quantized() -> None:
    config = PRESETS["smollm2-135m"]
    quantized = 30 * (2 * 576 * 576 + 2 * 192 * 576 + 3 * 1536 * 576)
    kept = 134_515_008 - quantized
    sizes = {each.precision: each.weight_bytes for each in estimate_memory(config, 0)}
    assert sizes["int4 group 32"] == quantized * 5 // 8 + 2 * kept


def test_kv_cache_of_llama_3_8b_is_128_kib_per_token() -> None:
    assert get_kv_bytes_per_token(LLAMA_3_8B, 2) == 128 * 1024
    assert estimate(0, "float32").kv_bytes_per_token == 256 * 1024
    assert estimate(0, "int4 group 32").kv_bytes_per_token == 128 * 1024


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
    assert len(others) == 4


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


@pytest.mark.parametrize("text", ["24", "24G", "GiB", "-1GiB", "0GB", "1e3GiB", "1,5GB", "24 TB", "", "nan GB"])
def test_parse_size_refuses(text: str) -> None:
    with pytest.raises(InspectionError, match=r"GiB, GB, MiB, MB or bytes") as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal:  16000 kB\nMemFree:  100 kB\nMemAvailable:    8000 kB\n"}


def test_available_memory_without_control_groups(tmp_path: Path) -> None:
    assert get_available_memory(write(tmp_path, MEMINFO)) == 8000 * 1024


@pytest.mark.parametrize("group", ["/", "/app/worker", "/not/visible/here"])
def test_available_memory_within_a_control_group(tmp_path: Path, group: str) -> None:
    cgroup = {
        "proc/self/cgroup": f"0::{group}\n",
        "sys/fs/cgroup/memory.max": "5000000\n",
        "sys/fs/cgroup/memory.current": "4000000\n",
        "sys/fs/cgroup/memory.stat": "anon 1\ninactive_file 500000\nactive_file 7\n",
        "sys/fs/cgroup/app/worker/memory.max": "max\n",
        "sys/fs/cgroup/app/worker/memory.current": "3000000\n",
    }
    assert get_available_memory(write(tmp_path, MEMINFO | cgroup)) == 1_500_000


def test_available_memory_within_a_control_group_of_version_1(tmp_path: Path) -> None:
    cgroup = {
        "proc/self/cgroup": "5:cpu,cpuacct:/\n4:memory:/job\n0::/\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "3000000\n",
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "2000000\n",
        "sys/fs/cgroup/memory/job/memory.stat": "total_inactive_file 100000\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "2500000\n",
    }
    assert get_available_memory(write(tmp_path, MEMINFO | cgroup)) == 1_100_000


def test_available_memory_elsewhere_is_the_physical_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sysconf_names", {"SC_PHYS_PAGES": 1, "SC_PAGE_SIZE": 2}, raising=False)
    monkeypatch.setattr("os.sysconf", {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}.__getitem__, raising=False)
    assert get_available_memory(tmp_path) == 4_096_000


def test_unknown_memory_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sysconf_names", {}, raising=False)
    with pytest.raises(InspectionError, match="--memory"):
        get_available_memory(tmp_path)
