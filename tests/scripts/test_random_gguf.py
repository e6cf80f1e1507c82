from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import gguf
import numpy as np
import pytest
import torch

from gptfast.checkpoint import open_checkpoint
from gptfast.checkpoint.presets import get_preset
from gptfast.checkpoint.shapes import list_tensor_shapes
from gptfast.config import ModelConfig
from gptfast.model import scale_rope_frequencies
from gptfast.session import load
from tests.reference.sessions import ROOT, complete, run_process

SCRIPT = ROOT / "scripts" / "random_gguf.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("random_gguf", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shrink(preset: str) -> ModelConfig:
    """A preset with all that tells architectures apart, but small."""
    config = get_preset(preset)
    return replace(
        config, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=32, ffn_dim=96, vocab_size=384, max_seq_len=512
    )


@pytest.mark.parametrize("quantization", ["q4_0", "q8_0"])
@pytest.mark.parametrize("preset", ["llama-3-8b", "llama-3.2-1b", "mistral-7b", "qwen2.5-0.5b", "qwen3-8b"])
def test_a_file_is_read_as_the_model_that_it_was_made_for(
    tiny_cache: None, script: ModuleType, tmp_path: Path, preset: str, quantization: str
) -> None:
    config, path = shrink(preset), tmp_path / "random.gguf"
    script.write_random_gguf(path, config, quantization)
    checkpoint = open_checkpoint(path)
    read = checkpoint.config
    assert read == replace(
        config, architecture=read.architecture, norm_eps=read.norm_eps, rope_scaling=read.rope_scaling
    )
    assert read.norm_eps == pytest.approx(config.norm_eps)
    assert read.architecture == ("llama" if config.architecture == "mistral" else config.architecture)
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    frequencies = config.rope_theta**-exponents
    torch.testing.assert_close(
        scale_rope_frequencies(frequencies, read.rope_scaling), scale_rope_frequencies(frequencies, config.rope_scaling)
    )
    assert checkpoint.names() == set(list_tensor_shapes(config))
    assert complete(load(path, dtype="float32"), "The words", 4, ignore_eos=True).new_tokens == 4


@pytest.mark.parametrize(("quantization", "levels"), [("q4_0", 16), ("q8_0", 256)])
def test_matrices_keep_activations_near_their_size(
    script: ModuleType, tmp_path: Path, quantization: str, levels: int
) -> None:
    config, path = shrink("llama-3.2-1b"), tmp_path / "random.gguf"
    script.write_random_gguf(path, config, quantization)
    for tensor in gguf.GGUFReader(path).tensors:
        if len(tensor.shape) == 1:
            continue
        assert tensor.tensor_type.name == quantization.upper()
        weights = gguf.dequantize(tensor.data, tensor.tensor_type)
        assert np.std(weights) == pytest.approx(weights.shape[1] ** -0.5, rel=0.05)
        assert abs(np.mean(weights)) < 0.2 * np.std(weights)
        assert len(np.unique(weights)) == levels


def test_a_file_is_the_same_each_time_it_is_made(script: ModuleType, tmp_path: Path) -> None:
    for name in ("first", "second"):
        script.write_random_gguf(tmp_path / name, shrink("qwen3-8b"), "q4_0")
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()


def test_an_unknown_preset_is_one_line(tmp_path: Path) -> None:
    outcome = run_process(SCRIPT, "lama-3-8b", "--output", tmp_path / "random.gguf")
    outcome.assert_refused("lama-3-8b", "did you mean llama-3-8b?")
