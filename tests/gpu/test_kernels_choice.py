"""`--kernels` on a GPU: each choice computes what the expanded weights do on a CPU, and its steps are recorded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from gptfast.checkpoint import open_checkpoint
from gptfast.kernels.cuda.tinygemm import multiply, pack
from gptfast.kernels.ops import KernelChoice
from gptfast.loading import Weights, load_model
from gptfast.runner import Runner
from gptfast.session import load
from tests.reference.checkpoints import write_hf
from tests.reference.families import WIDE, random_tokens, random_weights
from tests.reference.quantized_weights import draw_quantized
from tests.reference.sessions import tiny_config
from tests.reference.tokenizers import train_byte_level, write_tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("tiny_cache"),
]

CUDA = torch.device("cuda")
CHOICES: list[tuple[KernelChoice, Weights]] = [
    ("triton", "int4"),
    ("triton", "int8"),
    ("triton", "bf16"),
    ("inductor", "int8"),
    ("inductor", "bf16"),
    ("torchao", "int4"),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = replace(WIDE, vocab_size=tiny_config().vocab_size)
    written = write_hf(tmp_path_factory.mktemp("wide"), random_weights(config), config)
    return write_tokenizer(written, train_byte_level())


def read(runner: Runner, ids: list[int]) -> Tensor:
    """Logits after a prompt, after several tokens that are verified, and after each of two more; on the host."""
    start, device = len(ids) - 7, runner.device
    rows = [runner.prefill(ids[:start]), runner.verify(torch.tensor(ids[start:-2], device=device), start)]
    rows += [runner.decode(torch.tensor([ids[place]], device=device), place) for place in (len(ids) - 2, len(ids) - 1)]
    return torch.cat([row.float().cpu() for row in rows])


@pytest.mark.parametrize(("kernels", "weights"), CHOICES)
def test_logits_are_those_of_the_expanded_weights(kernels: KernelChoice, weights: Weights, directory: Path) -> None:
    ids = random_tokens(WIDE, 60)
    expected = read(Runner(load_model(open_checkpoint(directory), weights=weights, kernels=None)), ids)
    session = load(directory, device="cuda", weights=weights, kernels=kernels, compile=True)
    assert session.kernels == kernels
    found = read(session.runner, ids)
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()
    assert session.runner.replayed_steps == 3


@pytest.mark.parametrize("rows", [1, 5, 16, 40])
@pytest.mark.parametrize("offset", [None, "zeros", "mins"])
@pytest.mark.parametrize(("columns", "group_size"), [(512, 256), (512, 128), (192, 64), (96, 32)])
def test_torchaos_product_is_that_of_the_matrix(
    columns: int, group_size: int, offset: Literal["zeros", "mins"] | None, rows: int
) -> None:
    weight = draw_quantized(40, columns, 4, group_size, offset)
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = x.float() @ weight.dequantize().T
    found = multiply(x.to(CUDA), pack(weight.to(CUDA))).float().cpu()
    assert (found - expected).abs().max() < 0.02 * expected.abs().max()
