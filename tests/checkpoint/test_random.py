"""Random weights in a preset's shapes."""

from __future__ import annotations

from types import MappingProxyType

import pytest
import torch

from gptfast.checkpoint import presets
from gptfast.checkpoint.random import RandomCheckpoint
from gptfast.loading import load_model
from tests.reference.families import FAMILIES


@pytest.fixture(params=FAMILIES, ids=lambda family: family)
def checkpoint(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> RandomCheckpoint:
    monkeypatch.setattr(presets, "PRESETS", MappingProxyType({"tiny": FAMILIES[request.param]}))
    return RandomCheckpoint("tiny")


def test_every_architecture_loads_and_computes(checkpoint: RandomCheckpoint) -> None:
    model = load_model(checkpoint, dtype=torch.bfloat16)
    model.setup_caches(1, 16)
    position = torch.arange(8)
    logits = model(torch.arange(8)[None], position, position)
    assert logits.isfinite().all()
    assert logits.std() > 0.1


def test_the_weights_are_a_function_of_the_name(checkpoint: RandomCheckpoint) -> None:
    name = "layers.0.attention.wo.weight"
    assert checkpoint.read(name).equal(checkpoint.read(name))
    assert not checkpoint.read(name).equal(checkpoint.read("layers.1.attention.wo.weight"))
