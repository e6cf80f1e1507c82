"""The model on the CUDA kernels, which run on CPU tensors under Triton's interpreter here."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gptfast.checkpoint import open_checkpoint
from gptfast.kernels import ops
from gptfast.linear import TritonEmbedding, TritonLinear
from gptfast.loading import Weights, load_model
from gptfast.model import Transformer
from gptfast.runner import INITIAL_CAPACITY, Runner, plan_chunks
from tests.reference.checkpoints import write_hf
from tests.reference.families import FAMILIES, random_weights
from tests.reference.graphs import CheckedGraphs

pytestmark = [
    pytest.mark.usefixtures("tiny_cache"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, tests/gpu runs the model on it"),
]

TOLERANCE = 2e-4


@pytest.fixture(scope="module", autouse=True)
def _operators() -> None:
    assert ops.has_triton_kernels()


@pytest.fixture(autouse=True)
def _small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(INITIAL_CAPACITY, "cpu", 64)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer and few ids, as the interpreter takes milliseconds for what a GPU does in microseconds."""
    config = replace(FAMILIES["llama-8-2"], n_layers=1, vocab_size=96)
    return write_hf(tmp_path_factory.mktemp("triton"), random_weights(config), config)


def load_on_triton(directory: Path, weights: Weights, **settings: bool) -> Transformer:
    return load_model(open_checkpoint(directory), weights=weights, kernels="triton", **settings)


def make_ids(count: int) -> list[int]:
    return [(7 * place) % 96 for place in range(count)]


def read(runner: Runner, ids: list[int], n_steps: int) -> Tensor:
    """Logits after a start of up to 16 ids, all at once, and after each of the last `n_steps`."""
    start = len(ids) - n_steps
    rows = [runner.verify(torch.tensor(ids[:start]), 0)[-1:]]
    rows += [runner.decode(torch.tensor([ids[position]]), position) for position in range(start, len(ids))]
    return torch.cat(rows)


@pytest.mark.parametrize("weights", ["int4", "int8", "fp8"])
def test_logits_are_those_of_the_expanded_weights(weights: Weights, directory: Path) -> None:
    model = load_on_triton(directory, weights)
    assert all(isinstance(layer.attention.wqkv, TritonLinear) for layer in model.layers)
    assert model.list_weight_precisions()[0].split()[0] == weights
    ids = make_ids(15)
    expected = read(Runner(load_model(open_checkpoint(directory), weights=weights, kernels=None)), ids, 3)
    assert (read(Runner(model), ids, 3) - expected).abs().max() < TOLERANCE


def test_a_prompt_is_read_in_large_chunks(directory: Path) -> None:
    ids = make_ids(45)
    packed, expanded = (
        Runner(load_model(open_checkpoint(directory), weights="int4", kernels=kernels)) for kernels in ("triton", None)
    )
    assert (packed.prefill(ids) - expanded.prefill(ids)).abs().max() < TOLERANCE
    following = torch.tensor([5])
    assert (packed.decode(following, 45) - expanded.decode(following, 45)).abs().max() < TOLERANCE


def test_a_tied_embedding_is_read_and_multiplied_as_packed(directory: Path, tmp_path: Path) -> None:
    packed, expanded = (
        load_model(open_checkpoint(directory), weights="int8", kernels=kernels) for kernels in ("triton", None)
    )
    assert packed.list_weight_precisions() == ["int8 channel"]
    embedding = packed.tok_embeddings
    if packed.output is None:
        assert isinstance(embedding, TritonEmbedding)
    tokens = torch.tensor([[3, 7, 3]])
    assert torch.equal(embedding(tokens), expanded.tok_embeddings(tokens))


def test_a_dense_model_in_float32_stays_dense(directory: Path) -> None:
    model = load_on_triton(directory, "stored")
    assert not any(isinstance(module, TritonLinear | TritonEmbedding) for module in model.modules())
    ids = make_ids(15)
    expected = read(Runner(load_model(open_checkpoint(directory), kernels=None)), ids, 3)
    assert (read(Runner(model), ids, 3) - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_rows_that_are_verified_are_those_of_plain_steps(weights: Weights, directory: Path) -> None:
    """The kernels' own tests compare bits; the interpreter's products of other shapes may round otherwise."""
    runner = Runner(load_on_triton(directory, weights, exact_rows=True))
    ids = make_ids(14)
    plain = read(runner, ids, 5)
    for count in (2, 5):
        rows = runner.verify(torch.tensor(ids[9 : 9 + count]), 9)
        assert (rows - plain[1 : 1 + count]).abs().max() < 1e-5


def test_recorded_steps_give_the_same_logits_to_the_bit(directory: Path) -> None:
    model, ids = load_on_triton(directory, "int8"), make_ids(4)
    expected = read(Runner(model), ids, 2)
    graphs = CheckedGraphs()
    assert torch.equal(read(Runner(model, graphs=graphs), ids, 2), expected)
    assert (graphs.recorded, graphs.replayed) == (2, 3)


def flash_lower_right(q: Tensor, k: Tensor, v: Tensor, dropout: float, is_causal: bool) -> tuple[Tensor]:
    """What torch's operator does on CUDA: of S tokens over N slots, token i sees those up to N - S + i."""
    assert (dropout, is_causal) == (0.0, True)
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    return (F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True),)


@pytest.mark.parametrize("length", [20, 32, 45, 200, 290])
def test_flash_attention_reads_a_prompt_up_to_the_end_of_its_padding(
    length: int, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_on_triton(directory, "stored")
    ids = make_ids(length)
    expected = torch.cat([Runner(model).prefill(ids), Runner(model).score(ids)])
    calls: list[int] = []

    def flash(*inputs: Any) -> tuple[Tensor]:
        calls.append(inputs[1].shape[2])
        return flash_lower_right(*inputs)

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention", SimpleNamespace(default=flash))
    monkeypatch.setattr(Transformer, "flashes", property(lambda model: True))
    found = torch.cat([Runner(model).prefill(ids), Runner(model).score(ids)])
    assert (found - expected).abs().max() < TOLERANCE
    ends = list(itertools.accumulate(plan_chunks(length)))
    assert calls == 2 * ends
