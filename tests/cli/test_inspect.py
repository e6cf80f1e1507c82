from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from click.testing import CliRunner, Result

from gptfast.checkpoint.presets import PRESETS
from gptfast.cli.inspect import command
from gptfast.config import ModelConfig, RopeScaling
from gptfast.errors import CheckpointError, UserError
from gptfast.inspection import InspectionError


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(command, arguments)


def read_rows(output: str) -> dict[str, list[str]]:
    """The lines of the tables by their first cell, cells split at two or more spaces."""
    rows = [[cell for cell in line.split("  ") if cell.strip()] for line in output.splitlines()]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows if row}


@pytest.mark.parametrize("name", ["llama-3-8b", "llama-3.1-8b"])
def test_tables_of_llama_3_8b(name: str) -> None:
    result = invoke(name, "--memory", "24GiB")
    assert result.exit_code == 0
    rows = read_rows(result.output)
    assert rows["attention.wq"] == ["4,096 x 4,096", "16,777,216", "536,870,912"]
    assert rows["attention.wo"] == ["4,096 x 4,096", "16,777,216", "536,870,912"]
    assert rows["attention.wk"] == rows["attention.wv"] == ["1,024 x 4,096", "4,194,304", "134,217,728"]
    assert rows["attention"] == ["41,943,040", "1,342,177,280"]
    assert rows["feed_forward.w1"][0] == rows["feed_forward.w3"][0] == "14,336 x 4,096"
    assert rows["tok_embeddings"] == rows["output"] == ["128,256 x 4,096", "525,336,576"]
    assert rows["total"] == ["8,030,261,248"]
    assert rows["float32"] == ["32.00", "32.121 GB", "131.072 MB", "does not fit, 6.351 GB short"]
    assert rows["bfloat16"][:3] == ["16.00", "16.061 GB", "131.072 MB"]
    assert "24.0 GiB given" in result.output


def test_rope_scaling_is_3_1s_and_not_3s() -> None:
    old, new = invoke("llama-3-8b").output, invoke("llama-3.1-8b").output
    assert "rope_theta 500,000, RoPE not scaled" in old
    assert "rope_theta 500,000, scaled RoPE (llama3, factor 8, low 1, high 4, original context 8,192)" in new


def test_context_says_what_limits_it() -> None:
    rows = read_rows(invoke("llama-3.1-8b", "--memory", "24GiB").output)
    assert rows["bfloat16"][-1] == "74,075 tokens, all that fits"
    assert rows["int4 group 32"][-1] == "131,072 tokens, the model's limit"


def test_keys_and_values_of_int8_leave_room_for_more_context() -> None:
    result = invoke("llama-3.1-8b", "--memory", "24GiB", "--kv-dtype", "int8")
    assert "batch size 1, KV cache in int8" in result.output
    assert read_rows(result.output)["bfloat16"][2:] == ["67.584 MB", "131,072 tokens, the model's limit"]


def test_tied_output_counts_nothing() -> None:
    rows = read_rows(invoke("llama-3.2-1b").output)
    assert rows["output"] == ["tied to tok_embeddings", "0"]
    assert rows["total"] == ["1,235,814,400"]


def test_biases_and_norms_have_their_own_rows() -> None:
    assert read_rows(invoke("qwen2.5-7b").output)["attention.wk.bias"] == ["512", "512", "14,336"]
    assert read_rows(invoke("qwen3-8b").output)["attention.q_norm"] == ["128", "128", "4,608"]


def test_free_memory_is_used_without_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gptfast.memory.get_available_host_memory", lambda: 3 * 2**30)
    assert "3.0 GiB free on this machine" in invoke("smollm2-135m").output


def test_unknown_free_memory_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gptfast.memory.get_available_host_memory", lambda: None)
    assert isinstance(error := invoke("smollm2-135m").exception, UserError)
    assert "--memory" in str(error)


def test_json_is_one_object_on_the_last_line() -> None:
    result = invoke("llama-3-8b", "--memory", "16GiB", "--json")
    report = json.loads(result.output.splitlines()[-1])
    assert report["parameters"]["total"] == 8_030_261_248
    assert report["parameters"]["attention_per_block"] == 41_943_040
    assert report["memory"]["available_bytes"] == 16 * 2**30
    bfloat16 = report["memory"]["estimates"][1]
    assert bfloat16["precision"] == "bfloat16"
    assert bfloat16["weight_bytes"] == 16_060_522_496
    assert bfloat16["kv_bytes_per_token"] == 131_072
    assert ModelConfig(**report["config"]) == PRESETS["llama-3-8b"]


def fake_checkpoints(monkeypatch: pytest.MonkeyPatch, config: ModelConfig, stored_bytes: int) -> list[Path]:
    opened: list[Path] = []

    def open_checkpoint(path: Path) -> SimpleNamespace:
        opened.append(path)
        return SimpleNamespace(config=config, stored_bytes=stored_bytes)

    module = sys.modules["gptfast.checkpoint"]
    assert isinstance(module, ModuleType)
    monkeypatch.setattr(module, "open_checkpoint", open_checkpoint, raising=False)
    return opened


def test_checkpoint_is_opened_and_its_stored_size_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    scaling = RopeScaling("factors", factors=(1.0, 1.5, 8.0))
    config = dataclasses.replace(PRESETS["smollm2-135m"], rope_scaling=scaling, sliding_window=2047)
    opened = fake_checkpoints(monkeypatch, config, 96_630_528)
    (tmp_path / "model.gguf").touch()
    result = invoke(str(tmp_path / "model.gguf"), "--memory", "1GB")
    assert result.exit_code == 0, result.exception
    assert opened == [tmp_path / "model.gguf"]
    assert read_rows(result.output)["as stored"][:2] == ["5.75", "0.097 GB"]
    assert "3 stored factors, 1 to 8" in result.output
    assert "sliding window 2,047" in result.output


def test_preset_wins_over_a_file_of_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    opened = fake_checkpoints(monkeypatch, PRESETS["smollm2-135m"], 1)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama-3-8b").mkdir()
    assert "8,030,261,248" in invoke("llama-3-8b").output
    assert opened == []
    assert "134,515,008" in invoke("./llama-3-8b").output


def test_unknown_name_lists_the_presets() -> None:
    result = invoke("llama-4")
    assert isinstance(result.exception, CheckpointError)
    message = str(result.exception)
    assert message.startswith("no such file or directory, and 'llama-4' is not a preset")
    assert all(name in message for name in PRESETS)
    assert "\n" not in message


def test_unreadable_size_is_refused() -> None:
    result = invoke("llama-3-8b", "--memory", "24G")
    assert isinstance(result.exception, InspectionError)
    assert "'24G'" in str(result.exception)
