"""Checkpoints that nobody's converter writes, but that people have: each opens, or is refused in one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gptfast.cache import CACHE_VARIABLE
from gptfast.checkpoint import open_checkpoint
from gptfast.checkpoint.hf_config import parse_config
from gptfast.config import RopeScaling
from gptfast.errors import CheckpointError, PromptError, UserError
from gptfast.generation import generate
from gptfast.loading import Weights
from gptfast.runner import Runner
from gptfast.session import load
from tests.reference.checkpoints import INDEX_NAME, edit_json, hf_config, write_hf, write_json, write_meta
from tests.reference.families import FAMILIES, random_tokens, random_weights
from tests.reference.gguf_files import gguf_name, write_gguf
from tests.reference.product import assert_holds, assert_refused
from tests.reference.product import load as load_model
from tests.reference.sessions import CommandLine, load_tiny, random_prompt, tiny_config, write_tiny_model
from tests.reference.tokenizers import train_byte_level

CONFIG = FAMILIES["llama-8-2"]
WEIGHTS = random_weights(CONFIG)
QUERY, KEY = "layers.1.attention.wq.weight", "layers.1.attention.wk.weight"
BRACKETS = "[" * 200_000 + "]" * 200_000
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return write_hf(tmp_path / "hf", WEIGHTS, CONFIG)


@pytest.fixture
def meta(tmp_path: Path) -> Path:
    return write_meta(tmp_path / "meta", WEIGHTS, CONFIG)


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(monkeypatch, capsys)


def put_text(file: Path, key: str, value: str) -> None:
    """Set a key of a JSON file to a value that Python's writer would refuse."""
    content = json.loads(file.read_text()) | {key: "@value@"}
    file.write_text(json.dumps(content).replace('"@value@"', value))


# Shapes that cannot be reordered


@pytest.mark.parametrize("shape", [(63, 64), (60, 64), (64, 60), (64,), ()], ids=str)
@pytest.mark.parametrize("name", [QUERY, KEY])
def test_rotary_rows_of_the_wrong_number_are_named(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    path = write_meta(tmp_path / "meta", WEIGHTS, CONFIG, extra={name: torch.ones(shape)})
    assert_refused(path, name, str(list(shape)))
    without = {key: tensor for key, tensor in WEIGHTS.items() if key != name}
    if shape:  # GGUF has no tensors without dimensions
        write_gguf(tmp_path / "model.gguf", without, CONFIG, extra={gguf_name(name): torch.ones(shape)})
        assert_refused(tmp_path / "model.gguf", name, str(list(shape)))


@pytest.mark.parametrize("rows", [48, 80])
def test_quantized_rotary_rows_of_the_wrong_number_are_named(rows: int, tmp_path: Path) -> None:
    weights = WEIGHTS | {QUERY: torch.ones(rows, CONFIG.dim)}
    write_gguf(tmp_path / "model.gguf", weights, CONFIG, types={QUERY: "Q8_0"})
    assert_refused(tmp_path / "model.gguf", QUERY, f"[{rows}, {CONFIG.dim}]")


@pytest.mark.parametrize(
    "head", [torch.tensor(1.0), torch.ones(CONFIG.vocab_size), torch.ones(0, 0), torch.ones(2, 2, 2)]
)
@pytest.mark.parametrize("vocab_size", [CONFIG.vocab_size, -1])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_head_that_is_no_matrix_is_refused(shards: int, vocab_size: int, head: Tensor, tmp_path: Path) -> None:
    path = write_meta(tmp_path / "meta", WEIGHTS, CONFIG, shards=shards, extra={"output.weight": head})
    edit_json(path / "params.json", vocab_size=vocab_size)
    assert_refused(path)


@pytest.mark.parametrize("name", ["tok_embeddings.weight", "layers.0.feed_forward.w2.weight", "norm.weight"])
def test_sharded_tensors_without_dimensions_are_refused(name: str, tmp_path: Path) -> None:
    assert_refused(write_meta(tmp_path / "meta", WEIGHTS, CONFIG, shards=2, extra={name: torch.tensor(1.0)}), name)


# Directories in the place of files, and files in other places


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "generation_config.json", INDEX_NAME])
def test_a_directory_with_the_name_of_a_file_is_one_line(name: str, tmp_path: Path, cli: CommandLine) -> None:
    path = write_tiny_model(tmp_path / "model")
    (path / name).unlink(missing_ok=True)
    (path / name).mkdir()
    cli("generate", "--checkpoint", path, "--dtype", "float32", "--prompt", "x").assert_refused(name)


@pytest.mark.parametrize("name", ["consolidated.00.pth", "params.json"])
def test_a_directory_with_the_name_of_metas_file_is_one_line(name: str, meta: Path, cli: CommandLine) -> None:
    (meta / name).unlink()
    (meta / name).mkdir()
    cli("generate", "--checkpoint", meta, "--dtype", "float32", "--prompt", "x").assert_refused(name)


@pytest.mark.parametrize("name", ["sub/model.safetensors", "./model.safetensors", "a/b/c.safetensors"])
def test_an_index_may_name_files_of_other_directories(name: str, hf: Path) -> None:
    (hf / name).parent.mkdir(parents=True, exist_ok=True)
    (hf / "model.safetensors").rename(hf / name)
    from safetensors import safe_open

    with safe_open(hf / name, framework="pt") as file:
        weight_map = dict.fromkeys(file.keys(), name)
    write_json(hf / INDEX_NAME, {"weight_map": weight_map})
    assert_holds(hf, WEIGHTS)


# Numbers and nesting that a parser chokes on


@pytest.mark.parametrize("digits", ["1" + "0" * 400, "9" * 6000, "1e400", "-1e400", "NaN"], ids=lambda text: text[:8])
@pytest.mark.parametrize(
    "key", ["rms_norm_eps", "rope_theta", "hidden_size", "max_position_embeddings", "sliding_window"]
)
def test_numbers_beyond_all_bounds_are_refused(key: str, digits: str, tmp_path: Path) -> None:
    path = write_hf(tmp_path / "hf", random_weights(FAMILIES["mistral"]), FAMILIES["mistral"])
    put_text(path / "config.json", key, digits)
    assert_refused(path, "config.json")


@pytest.mark.parametrize("digits", ["1" + "0" * 400, "9" * 6000, "1e400"], ids=lambda text: text[:8])
def test_a_rotary_factor_beyond_all_bounds_is_refused(digits: str, hf: Path) -> None:
    put_text(hf / "config.json", "rope_scaling", json.dumps(LLAMA3_ROPE).replace("8.0", digits))
    assert_refused(hf, "config.json")


@pytest.mark.parametrize("digits", ["1" + "0" * 400, "9" * 6000, "1e400"], ids=lambda text: text[:8])
@pytest.mark.parametrize("key", ["dim", "norm_eps", "rope_theta", "ffn_dim_multiplier", "multiple_of"])
def test_numbers_of_meta_beyond_all_bounds_are_refused(key: str, digits: str, meta: Path) -> None:
    put_text(meta / "params.json", key, digits)
    assert_refused(meta, "params.json")


@pytest.mark.parametrize("is_value", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        INDEX_NAME,
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
    ],
)
def test_brackets_without_end_are_one_line(name: str, is_value: bool, tmp_path: Path, cli: CommandLine) -> None:
    path = write_tiny_model(tmp_path / "model")
    (path / name).write_text(f'{{"a": {BRACKETS}}}' if is_value else BRACKETS)
    cli("generate", "--checkpoint", path, "--dtype", "float32", "--prompt", "x").assert_refused(name)


def test_brackets_without_end_are_refused_in_params(meta: Path) -> None:
    (meta / "params.json").write_text(BRACKETS)
    assert_refused(meta, "params.json")


# Rotary settings that make no numbers


@pytest.mark.parametrize("location", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"factor": 0}, "factor"),
        ({"rope_type": "linear", "factor": 0.0}, "factor"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"low_freq_factor": 4.0}, "low_freq_factor"),
        ({"low_freq_factor": 8.0}, "low_freq_factor"),
        ({"high_freq_factor": 1}, "low_freq_factor"),
        ({"low_freq_factor": 0}, "low_freq_factor"),
        ({"original_max_position_embeddings": 0}, "original_max_position_embeddings"),
        ({"partial_rotary_factor": 0.5}, "rotate a part of every head"),
        ({"full_attention": LLAMA3_ROPE}, "differ between layers"),
    ],
)
def test_rotary_settings_that_make_no_numbers_are_refused(
    location: str, change: dict[str, Any], word: str, hf: Path
) -> None:
    edit_json(hf / "config.json", **{location: LLAMA3_ROPE | {"rope_theta": 1e4} | change})
    assert_refused(hf, "config.json", word)


def test_these_rotary_settings_would_open_unchanged(hf: Path) -> None:
    edit_json(hf / "config.json", rope_parameters=LLAMA3_ROPE | {"rope_theta": 1e4, "partial_rotary_factor": 1.0})
    scaling = RopeScaling("llama3", 8.0, 1.0, 4.0, 512)
    assert open_checkpoint(hf).config == replace(CONFIG, rope_theta=1e4, rope_scaling=scaling)


def test_a_rope_base_of_zero_is_refused_at_the_top_too(hf: Path) -> None:
    edit_json(hf / "config.json", rope_theta=0)
    assert_refused(hf, "config.json", "rope_theta")


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": 0},
        {"use_scaled_rope": True, "rope_scaling_factor": 0},
        {"use_scaled_rope": True, "rope_high_freq_factor": 1},
        {"use_scaled_rope": True, "rope_high_freq_factor": 0},
    ],
    ids=str,
)
def test_rotary_settings_of_meta_that_make_no_numbers_are_refused(change: dict[str, Any], meta: Path) -> None:
    edit_json(meta / "params.json", **change)
    assert_refused(meta, "params.json", list(change)[-1])


@pytest.mark.parametrize(
    ("metadata", "word"),
    [
        ({"llama.rope.freq_base": 0.0}, "llama.rope.freq_base"),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 0.0}, "factor"),
        ({"llama.rope.scaling.type": "linear"}, "factor"),
    ],
)
def test_rotary_settings_of_gguf_that_make_no_numbers_are_refused(
    metadata: dict[str, Any], word: str, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "model.gguf", WEIGHTS, CONFIG, metadata=metadata)
    assert_refused(tmp_path / "model.gguf", "model.gguf", word)


@pytest.mark.parametrize("factors", [torch.ones(3), torch.ones(5), torch.ones(2, 2), torch.zeros(4)], ids=str)
def test_rotary_factors_of_the_wrong_form_are_refused(factors: Tensor, tmp_path: Path) -> None:
    assert CONFIG.head_dim == 8
    write_gguf(tmp_path / "model.gguf", WEIGHTS, CONFIG, extra={"rope_freqs.weight": factors})
    assert_refused(tmp_path / "model.gguf", "model.gguf", "factors")


def test_the_old_spelling_of_linear_scaling_is_honoured(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", WEIGHTS, CONFIG, metadata={"llama.rope.scale_linear": 4.0})
    assert open_checkpoint(tmp_path / "model.gguf").config.rope_scaling == RopeScaling("linear", factor=4.0)


# Settings that are missing or impossible


@pytest.mark.parametrize("key", ["block_count", "embedding_length", "attention.head_count", "context_length"])
def test_the_key_that_a_gguf_file_lacks_is_named_as_the_file_spells_it(key: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", WEIGHTS, CONFIG, without=[f"llama.{key}"])
    assert_refused(tmp_path / "model.gguf", "model.gguf", f"lacks llama.{key}")


@pytest.mark.parametrize(
    ("setting", "word"),
    [({"top_p": 3}, "top-p is 3"), ({"repetition_penalty": 0}, "repetition penalty is 0"), ({"top_k": -5}, "top_k")],
)
def test_impossible_sampling_names_its_file(setting: dict[str, Any], word: str, tmp_path: Path) -> None:
    path = write_hf(tmp_path / "hf", WEIGHTS, CONFIG, generation={"do_sample": True} | setting)
    assert_refused(path, str(path / "generation_config.json"), word)


@pytest.mark.parametrize("n_layers", [2, 28])
def test_the_first_28_layers_of_a_qwen_model_have_no_window_unless_told(n_layers: int) -> None:
    """As in transformers, whose default of max_window_layers is 28."""
    config = replace(FAMILIES["qwen2"], n_layers=n_layers)
    settings = hf_config(config) | {"use_sliding_window": True}
    del settings["max_window_layers"]
    assert parse_config(settings, "config.json") == config
    with pytest.raises(CheckpointError, match="mixes layers"):
        parse_config(settings | {"num_hidden_layers": 29}, "config.json")


# Ends of text that two files name differently


def test_the_tokenizers_own_end_counts_beside_the_configs(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "model", eos_ids=[0])
    session = load_tiny(path)
    assert session.defaults.eos_ids == (0,)
    prompt = random_prompt(20)
    # A token with text of its own, so that the tokenizer's file can name it.
    ids = generate(session, prompt, max_new_tokens=30)[0].token_ids
    end = next(token_id for token_id in ids if len(session.tokenizer.token_bytes(token_id)) > 1)  # type: ignore[union-attr]
    edit_json(path / "tokenizer_config.json", eos_token=train_byte_level().id_to_token(end))
    session = load_tiny(path)
    assert session.eos_ids == {0, end}
    result = generate(session, prompt, max_new_tokens=30)[0]
    assert result.finish_reason == "eos"
    assert result.token_ids == ids[: ids.index(end) + 1]


# What does not fit this machine


def tell_free(monkeypatch: pytest.MonkeyPatch, module: str, free_bytes: int | None) -> None:
    monkeypatch.setattr(f"gptfast.{module}.get_available_memory", lambda _device: free_bytes)


@pytest.mark.parametrize(
    ("weights", "needed"), [("stored", "16.1 GB"), ("bf16", "16.1 GB"), ("fp32", "32.1 GB"), ("int8", "8.6 GB")]
)
def test_weights_that_do_not_fit_are_refused_before_anything_is_allocated(
    weights: Weights, needed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("the weights are allocated")

    monkeypatch.setattr("gptfast.session.load_model", fail)
    tell_free(monkeypatch, "loading", 1_500_000_000)
    with pytest.raises(UserError) as refused:
        load(preset="llama-3-8b", dtype="float32", weights=weights)
    for words in ("llama-3-8b", needed, "1.5 GB are free on cpu", "smaller model or --weights int4"):
        assert words in str(refused.value)


@pytest.mark.parametrize("free_bytes", [None, 10**12])
def test_weights_that_fit_or_may_fit_are_loaded(
    free_bytes: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell_free(monkeypatch, "loading", free_bytes)
    tell_free(monkeypatch, "runner", free_bytes)
    assert load(write_tiny_model(tmp_path / "model"), dtype="float32").runner.model.config == tiny_config()


def test_a_cache_that_does_not_fit_is_refused_with_both_numbers(hf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tell_free(monkeypatch, "runner", 1_500_000_000)
    model = load_model(hf, 1)
    slots = 2048 + 256
    needed = 2000 * slots * 2 * CONFIG.n_layers * CONFIG.n_kv_heads * CONFIG.head_dim * 4
    with pytest.raises(PromptError) as refused:
        Runner(model, batch_size=2000)
    for words in (f"{slots} tokens x batch size 2000", f"{needed / 1e9:.1f} GB", "1.5 GB are free on cpu"):
        assert words in str(refused.value)


def test_a_cache_that_cannot_grow_goes_on_as_it_was(hf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tell_free(monkeypatch, "runner", None)
    runner = Runner(load_model(hf, 1))
    ids = random_tokens(CONFIG, 50)
    expected = runner.prefill(ids)
    tell_free(monkeypatch, "runner", 1000)
    with pytest.raises(PromptError, match=r"0\.0 GB are free"):
        runner.reserve(runner.capacity + 1)
    assert torch.allclose(runner.prefill(ids[40:], 40), expected, atol=1e-4)
