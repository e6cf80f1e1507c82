from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gptfast.session import Session
from tests.reference.checkpoints import write_hf
from tests.reference.families import random_weights
from tests.reference.sessions import load_tiny, tiny_config
from tests.reference.tokenizers import train_byte_level, write_tokenizer

PADDING = 28
"""Ids beyond the tokenizer's."""


@pytest.fixture(scope="module")
def noisy_directory(tiny_cache: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with every weight off by some percent and a padded vocabulary."""
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: weight * (1 + 0.02 * torch.randn(weight.shape, generator=generator))
        for name, weight in random_weights(tiny_config()).items()
    }
    for name in ("tok_embeddings.weight", "output.weight"):
        padding = 0.25 * torch.randn(PADDING, tiny_config().dim, generator=generator)
        weights[name] = torch.cat([weights[name], padding])
    config = replace(tiny_config(), vocab_size=tiny_config().vocab_size + PADDING)
    directory = write_hf(tmp_path_factory.mktemp("noisy") / "model", weights, config)
    return write_tokenizer(directory, train_byte_level(), eos_token="<|im_end|>")


@pytest.fixture(scope="module")
def noisy(noisy_directory: Path) -> Session:
    return load_tiny(noisy_directory)
