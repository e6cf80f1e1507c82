"""The product as tests run it: a checkpoint on disk in, logits or a refusal out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gptfast.checkpoint import open_checkpoint
from gptfast.errors import CheckpointError
from gptfast.loading import load_model
from gptfast.model import Transformer


def load(path: Path, length: int, *, dtype: torch.dtype = torch.float32, batch_size: int = 1) -> Transformer:
    """The model at `path`, its caches made for `length` tokens."""
    model = load_model(open_checkpoint(path), device="cpu", dtype=dtype)
    model.setup_caches(batch_size, length)
    return model


def run(
    model: Transformer, tokens: list[int], chunks: Iterable[int] | None = None, *, attend: int | None = None
) -> Tensor:
    """Logits (S, V) after every token, the tokens fed in chunks of the given sizes, then one by one."""
    ids = torch.tensor([tokens])
    outputs, start = [], 0
    sizes = [len(tokens)] if chunks is None else list(chunks)
    sizes += [1] * (len(tokens) - sum(sizes))
    for size in sizes:
        stop = start + size
        kv_pos = torch.arange(attend or stop)
        outputs.append(model(ids[:, start:stop], torch.arange(start, stop), kv_pos)[0])
        start = stop
    return torch.cat(outputs)


def load_and_run(path: Path, tokens: list[int]) -> Tensor:
    """Float32 logits (S, V) of the model at `path` in one pass."""
    return run(load(path, len(tokens)), tokens)


def assert_holds(path: Path, weights: Mapping[str, Tensor]) -> None:
    """The checkpoint at `path` has exactly these tensors, bit by bit and in their dtypes."""
    checkpoint = open_checkpoint(path)
    assert set(checkpoint.names()) == set(weights)
    for name, expected in weights.items():
        actual = checkpoint.read(name)
        assert actual.dtype == expected.dtype, name
        assert torch.equal(actual, expected), name


def assert_refused(path: Path, *words: str) -> None:
    """Opening and loading `path` fails with an error of one line that says these words."""
    with pytest.raises(CheckpointError) as caught:
        load_model(open_checkpoint(path), device="cpu", dtype=torch.float32)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message
