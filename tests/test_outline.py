"""The products of a model, found without reading all of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gptfast.checkpoint import open_checkpoint
from gptfast.checkpoint.base import Checkpoint
from gptfast.errors import CheckpointError
from gptfast.kernels.cuda.products import Format, find_format
from gptfast.linear import TritonMatrix
from gptfast.loading import EMBEDDING, Weights, load_model
from gptfast.outline import Outline, list_products
from tests.reference.checkpoints import write_hf
from tests.reference.families import FAMILIES, random_weights
from tests.reference.gguf_files import write_gguf

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("tiny_cache")

CPU = torch.device("cpu")
CONFIG = replace(FAMILIES["llama-8-2"], n_layers=4)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file whose second layer has another w2, and whose third another wv; the last is as the first."""
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    weights = random_weights(CONFIG)
    types = {name: "Q4_0" for name, weight in weights.items() if weight.dim() == 2}
    types |= {
        "layers.1.feed_forward.w2.weight": "Q8_0",
        "layers.2.attention.wv.weight": "Q4_1",
        "output.weight": "Q8_0",
    }
    write_gguf(path, weights, CONFIG, types=types)
    return path


def list_all(checkpoint: Checkpoint, weights: Weights) -> set[tuple[Format, tuple[int, int]]]:
    """The matrices of the whole model that are multiplied with."""
    model = load_model(checkpoint, weights=weights, kernels="triton")
    embedding = "" if checkpoint.config.tie_word_embeddings else EMBEDDING.removesuffix(".weight")
    return {
        (find_format(module.weight), (module.weight.shape[0], module.weight.width))
        for name, module in model.named_modules()
        if isinstance(module, TritonMatrix) and name.removesuffix(".matrix") != embedding
    }


def test_layers_that_are_stored_alike_are_left_out(mixed: Path) -> None:
    checkpoint = open_checkpoint(mixed)
    outline = Outline(checkpoint)
    assert outline.config == replace(checkpoint.config, n_layers=3)
    assert len(outline.names()) == 3 + 3 * 9
    for name in ("layers.1.feed_forward.w2.weight", "layers.2.attention.wv.weight", "output.weight"):
        assert outline.describe_type(name) == checkpoint.describe_type(name)
        assert torch.equal(outline.read(name), checkpoint.read(name))


@pytest.mark.parametrize("weights", ["stored", "bf16", "int8", "int4"])
def test_products_are_those_of_the_whole_model(weights: Weights, mixed: Path) -> None:
    found = list_products(open_checkpoint(mixed), device=CPU, dtype=torch.float32, weights=weights)
    assert len(found) == len(set(found))
    assert set(found) == list_all(open_checkpoint(mixed), weights)
    if weights == "stored":
        assert {(form.name, shape) for form, shape in found} >= {
            ("int4 g32", (96, 64)),  # wq, wk and wv are one matrix where they are stored alike
            ("int4 g32", (80, 64)),
            ("int4 g32 mins", (16, 64)),
            ("int8 g32", (64, 192)),
            ("int8 g32", (320, 64)),
        }


def test_an_embedding_that_is_the_output_too_is_a_product(tmp_path: Path) -> None:
    config = FAMILIES["llama-tied"]
    write_hf(tmp_path, random_weights(config), config)
    found = list_products(open_checkpoint(tmp_path), device=CPU, dtype=torch.float32, weights="int8")
    assert (Format("int8"), (288, 64)) in found
    assert set(found) == list_all(open_checkpoint(tmp_path), "int8")


def test_a_layer_that_lacks_a_tensor_is_not_taken_for_another(tmp_path: Path) -> None:
    weights = random_weights(CONFIG)
    del weights["layers.3.attention.wo.weight"]
    write_hf(tmp_path, weights, CONFIG)
    with pytest.raises(CheckpointError, match="lacks tensor"):
        list_products(open_checkpoint(tmp_path), device=CPU, dtype=torch.float32)
