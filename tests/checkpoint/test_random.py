"""Random weights in a preset's shapes."""

from __future__ import annotations

from types import MappingProxyType

import pytest
import torch

from gptfast.checkpoint import presets
from gptfast.checkpoint.random import RandomCheckpoint
from gptfast.loading import load_model
from gptfast.quantization import FLOAT8, WeightScheme
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


@pytest.mark.parametrize("scheme", [FLOAT8, WeightScheme(8, None)], ids=WeightScheme.describe)
def test_rounded_weights_are_drawn_with_the_variance_of_the_dense(scheme: WeightScheme) -> None:
    rounded = RandomCheckpoint("llama-3.2-1b").read_rounded("layers.0.attention.wo.weight", (500, 960), scheme)
    assert rounded.codes.dtype == scheme.dtype
    values = rounded.dequantize()
    assert values.isfinite().all()
    assert float(values.std()) == pytest.approx(960**-0.5, rel=0.01)
    assert abs(float(values.mean())) < 0.05 * 960**-0.5


def test_the_weights_are_a_function_of_the_name(checkpoint: RandomCheckpoint) -> None:
    name = "layers.0.attention.wo.weight"
    assert checkpoint.read(name).equal(checkpoint.read(name))
    assert not checkpoint.read(name).equal(checkpoint.read("layers.1.attention.wo.weight"))
