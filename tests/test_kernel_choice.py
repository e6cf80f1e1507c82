"""`--kernels`: what may multiply beside our kernels, what it computes, and what it is refused for.

On CPU tensors Triton's interpreter runs our kernels, and `tests.reference.tinygemm` torch's int4.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gptfast.bench.kernels import list_products
from gptfast.checkpoint import open_checkpoint
from gptfast.errors import UserError
from gptfast.kernels import ops
from gptfast.kernels.cuda.packing import pack, unpack
from gptfast.kernels.cuda.tinygemm import pack as pack_tinygemm
from gptfast.kernels.ops import KernelChoice, Kernels, choose_kernels
from gptfast.linear import InductorMatrix, TinygemmMatrix, TritonEmbedding, TritonLinear, TritonMatrix, sum_products
from gptfast.loading import Weights, estimate_weight_bytes, load_model
from gptfast.model import Transformer
from gptfast.quantization import QuantizedWeight
from gptfast.runner import INITIAL_CAPACITY, Runner
from gptfast.session import check_kernels
from tests.reference import tinygemm
from tests.reference.checkpoints import write_hf
from tests.reference.families import FAMILIES, WIDE, random_weights
from tests.reference.gguf_files import write_gguf
from tests.reference.quantized_weights import draw_quantized
from tests.reference.sessions import CommandLine

pytestmark = [
    pytest.mark.usefixtures("tiny_cache"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, tests/gpu runs the kernels on it"),
]

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
IDS = torch.tensor([5, 64, 31, 17])


@pytest.fixture(scope="module", autouse=True)
def _operators() -> Iterator[None]:
    assert ops.has_triton_kernels()
    library = tinygemm.register()
    yield
    del library


@pytest.fixture(autouse=True)
def _small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(INITIAL_CAPACITY, "cpu", 64)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = replace(FAMILIES["llama-8-2"], n_layers=1, vocab_size=96)
    return write_hf(tmp_path_factory.mktemp("kernels"), random_weights(config), config)


def load(path: Path, weights: Weights, kernels: Kernels | None, dtype: torch.dtype = torch.bfloat16) -> Transformer:
    return load_model(open_checkpoint(path), weights=weights, dtype=dtype, kernels=kernels)


def read(model: Transformer) -> Tensor:
    """Logits after several tokens at once, and after one more."""
    runner = Runner(model)
    return torch.cat([runner.verify(IDS[:3], 0), runner.decode(IDS[3:], 3)])


def compile_by_tracer(layer: nn.Module) -> nn.Module:
    """As torch.compile has it, with the operations that it would generate code for run one by one."""
    compiled: nn.Module = torch.compile(layer, backend="eager", fullgraph=True)
    return compiled


# What is computed


@pytest.mark.parametrize(
    ("group_size", "offset", "has_bias"), [(None, None, False), (None, "zeros", True), (32, "mins", True)]
)
def test_a_compiled_product_with_one_row_is_a_sum_over_the_expanded_matrix(
    group_size: int | None, offset: str | None, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = draw_quantized(24, 96, 8, group_size, offset), torch.randn(16, 96).bfloat16()  # type: ignore[arg-type]
    layer = TritonLinear([InductorMatrix(pack(weight), "a form") for weight in weights], exact_rows=False)
    bias = torch.linspace(-1, 1, 40) if has_bias else None
    layer.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
    x = torch.randn(1, 1, 96, generator=torch.Generator().manual_seed(1))
    expanded = torch.cat([weights[0].dequantize(), weights[1].float()])
    expected = x @ expanded.T + (0 if bias is None else bias)
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)
    monkeypatch.setattr("gptfast.kernels.cuda.ops.linear", None)  # what would run eagerly, and with more rows
    torch.testing.assert_close(compile_by_tracer(layer)(x), expected, rtol=1e-5, atol=1e-5)


def test_more_rows_than_one_and_what_is_not_compiled_are_multiplied_by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = TritonLinear([InductorMatrix(pack(draw_quantized(24, 96, 8, None)), "int8 channel")], exact_rows=False)
    monkeypatch.setattr("gptfast.linear.sum_products", None)
    assert layer(torch.randn(1, 1, 96)).shape == (1, 1, 24)
    assert compile_by_tracer(layer)(torch.randn(1, 3, 96)).shape == (1, 3, 24)


def test_the_scale_of_a_whole_row_is_left_for_the_sum() -> None:
    """Else every weight would be multiplied with it."""
    packed = pack(draw_quantized(24, 96, 8, None))
    x = torch.randn(96)
    assert packed.scales is not None
    codes = unpack(replace(packed, scales=None))
    assert torch.equal(sum_products(x, packed), (codes * x).sum(-1) * packed.scales[:, 0])


@pytest.mark.parametrize(("kernels", "weights"), [("torchao", "int4"), ("inductor", "stored")])
def test_logits_are_those_of_the_expanded_weights(kernels: Kernels, weights: Weights, directory: Path) -> None:
    expected, found = (read(load(directory, weights, each)) for each in (None, kernels))
    assert (found - expected).abs().max() < 0.03 * expected.abs().max()


# What holds the matrices


def test_torchao_holds_the_int4_of_a_model_and_triton_the_rest(directory: Path) -> None:
    model = load(directory, "int4", "torchao")
    layer = model.layers[0]
    for product in (layer.attention.wqkv, layer.attention.wo, layer.feed_forward.w13, layer.feed_forward.w2):  # type: ignore[union-attr]
        assert isinstance(product, TritonLinear)
        assert [type(matrix) for matrix in product.matrices] == [TinygemmMatrix]
    assert isinstance(model.output, TritonLinear)
    assert [type(matrix) for matrix in model.output.matrices] == [TritonMatrix]
    assert model.kernels == "torchao"
    assert model.list_weight_precisions() == ["int4 g32", "int8 channel"]


@pytest.mark.parametrize(("weights", "holder"), [("int8", InductorMatrix), ("stored", nn.Linear), ("bf16", nn.Linear)])
def test_inductor_has_packed_int8_and_floats_as_torch_holds_them(
    weights: Weights, holder: type[nn.Module], directory: Path
) -> None:
    model = load(directory, weights, "inductor")
    layer = model.layers[0].attention.wqkv  # type: ignore[union-attr]
    [matrix] = layer.matrices if isinstance(layer, TritonLinear) else [layer]
    assert type(matrix) is holder
    assert model.kernels == "inductor"
    assert model.list_weight_precisions() == ["int8 channel" if weights == "int8" else "bfloat16"]


def test_floats_beside_int8_in_one_projection_are_packed_with_it(tmp_path: Path) -> None:
    types = dict.fromkeys(random_weights(WIDE), "Q8_0") | {"layers.0.attention.wv.weight": "BF16"}
    write_gguf(tmp_path / "model.gguf", random_weights(WIDE), WIDE, types=types)
    layer = load(tmp_path / "model.gguf", "stored", "inductor").layers[0].attention.wqkv  # type: ignore[union-attr]
    assert [precision for precision, _ in layer.list_matrices()] == ["Q8_0", "bfloat16"]
    assert all(isinstance(matrix, InductorMatrix) for matrix in layer.matrices)


def test_a_file_of_several_formats_has_its_int4_by_torchao(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As in Q4_K_M files; scales of such are of more bits than bfloat16 has."""
    types = dict.fromkeys(random_weights(WIDE), "Q4_K") | {"layers.0.attention.wv.weight": "Q6_K"}
    write_gguf(tmp_path / "model.gguf", random_weights(WIDE), WIDE, types=types)
    with caplog.at_level(logging.INFO, "gptfast"):
        model = load(tmp_path / "model.gguf", "stored", "torchao")
    layer = model.layers[0].attention.wqkv  # type: ignore[union-attr]
    assert [type(matrix) for matrix in layer.matrices] == [TinygemmMatrix, TritonMatrix]
    assert isinstance(model.tok_embeddings, TritonEmbedding)
    lines = [record.getMessage() for record in caplog.records if "bfloat16" in record.getMessage()]
    assert lines == ["weights stored as Q4_K have scales and zeros rounded to bfloat16, which torchao's kernel takes"]


@pytest.mark.parametrize(
    ("weights", "kernels"),
    [
        ("int4", "torchao"),
        ("int8", "inductor"),
        ("bf16", "inductor"),
        ("stored", "inductor"),
        ("int8", "triton"),
        ("fp8", "triton"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_bytes_of_a_model_are_counted_and_foretold(
    weights: Weights, kernels: Kernels, dtype: torch.dtype, directory: Path
) -> None:
    model = load(directory, weights, kernels, dtype)
    held = {parameter.untyped_storage().data_ptr(): parameter.nbytes for parameter in model.parameters()}
    embedding = sum(parameter.nbytes for parameter in model.tok_embeddings.parameters())
    row = embedding // model.config.vocab_size
    assert model.count_weight_bytes_per_token() == sum(held.values()) - embedding + row
    foretold = estimate_weight_bytes(open_checkpoint(directory), weights, dtype, CPU, kernels)
    assert foretold == pytest.approx(sum(held.values()), rel=0.06)


@pytest.mark.parametrize(("kernels", "weights"), [("torchao", "int4"), ("inductor", "int8"), ("triton", "int8")])
def test_a_benchmark_finds_the_weights_of_every_product(kernels: Kernels, weights: Weights, directory: Path) -> None:
    products = list_products(load(directory, weights, kernels))
    assert sorted(part for part, _ in products) == [
        "attention.wo",
        "attention.wqkv",
        "feed_forward.w13",
        "feed_forward.w2",
        "output",
    ]


def test_a_layer_prints_all_that_its_compiled_code_depends_on() -> None:
    narrow, wide = draw_quantized(8, 256, 4, 32), draw_quantized(8, 256, 4, 64)
    int8 = pack(draw_quantized(8, 256, 8, None))
    matrices: list[nn.Module] = [
        TinygemmMatrix(pack_tinygemm(narrow), "int4"),
        TinygemmMatrix(pack_tinygemm(wide), "int4"),
        TritonMatrix(int8, "int8"),
        InductorMatrix(int8, "int8"),
    ]
    assert len({repr(matrix) for matrix in matrices}) == len(matrices)


# What is refused


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)


@pytest.mark.parametrize("asked", ["triton", "inductor", "torchao"])
def test_a_gpu_that_runs_our_kernels_runs_what_is_asked_for(
    asked: KernelChoice, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu(monkeypatch, (8, 0))
    assert choose_kernels(CUDA, asked) == asked
    assert choose_kernels(CUDA) == "triton"


@pytest.mark.parametrize("asked", ["triton", "inductor", "torchao"])
def test_kernels_that_cannot_run_are_refused_by_their_reason(
    asked: KernelChoice, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=f"kernels {asked} are asked for and the device is cpu; leave them out"):
        choose_kernels(CPU, asked)
    pretend_gpu(monkeypatch, (7, 5))
    with pytest.raises(UserError, match=f"kernels {asked} need a GPU of sm_80 or later, and this one is of sm_75"):
        choose_kernels(CUDA, asked)
    assert choose_kernels(CUDA) is None
    pretend_gpu(monkeypatch, (9, 0))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=f"kernels {asked} need Triton, which is not installed"):
        choose_kernels(CUDA, asked)


def test_what_torch_compile_makes_needs_compiled_steps() -> None:
    with pytest.raises(UserError, match="compile the steps, or use triton"):
        check_kernels("inductor", torch.bfloat16, compile=False)
    check_kernels("inductor", torch.float32, compile=True)
    check_kernels("triton", torch.float16, compile=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_torchao_multiplies_in_bfloat16(dtype: torch.dtype) -> None:
    with pytest.raises(UserError, match=r"in bfloat16 alone and dtype is float(16|32); use bfloat16"):
        check_kernels("torchao", dtype, compile=True)
    check_kernels("torchao", torch.bfloat16, compile=False)


@pytest.mark.parametrize(
    ("kernels", "weights", "words"),
    [
        ("inductor", "int4", "dense weights and int8, and layers.0.attention.wq.weight is of int4 g32; use triton or"),
        ("inductor", "fp8", "dense weights and int8, and layers.0.attention.wq.weight is of fp8 channel; use triton"),
        ("torchao", "fp8", "torchao have int4 alone"),
        ("torchao", "int8", "torchao have int4 alone, and no matrix is of it; add --weights int4"),
        ("torchao", "stored", "torchao have int4 alone"),
        ("torchao", "bf16", "torchao have int4 alone"),
    ],
)
def test_weights_that_kernels_do_not_have_are_one_line(
    kernels: Kernels, weights: Weights, words: str, directory: Path
) -> None:
    with pytest.raises(UserError, match=words) as refused:
        load(directory, weights, kernels)
    assert "\n" not in str(refused.value)


def test_a_matrix_that_torchao_cannot_hold_is_named(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(directory)

    def read_rounded(name: str, shape: tuple[int, ...], scheme: object) -> QuantizedWeight:
        return draw_quantized(*shape, 4, None if name.endswith("w2.weight") else 32)

    monkeypatch.setattr(checkpoint, "read_rounded", read_rounded)
    words = "torchao cannot hold layers.0.feed_forward.w2.weight: its groups are of 192"
    with pytest.raises(UserError, match=words):
        load_model(checkpoint, weights="int4", dtype=torch.bfloat16, kernels="torchao")


@pytest.mark.parametrize("command", [["generate"], ["bench"], ["eval", "perplexity"]])
def test_every_command_that_runs_a_model_hands_the_choice_on(
    command: list[str], directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = CommandLine(monkeypatch, capsys)(
        *command, "--checkpoint", directory, "--device", "cpu", "--kernels", "inductor"
    )
    outcome.assert_refused("kernels inductor", "the device is cpu")
