"""What the compiled steps consist of on an NVIDIA GPU, by the code that torch.compile generates for one.

Steps are made as the runner makes them: `read` takes so many tokens and gives logits, `extend` takes one and chooses
the next; a `round` takes what was drafted and chooses what stands; `catch up` is a draft model's first step after a
round. All are recorded by us. `attend` takes so many by torch's own attention and is recorded by torch. Weights are
`dense`, in bfloat16 and multiplied by what Inductor generates or the library, or packed for our kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptfast.checkpoint.presets import PRESETS
from gptfast.compilation import CompileStatistics, compile_for_recording
from gptfast.config import SamplingConfig
from gptfast.decode import TextState
from gptfast.graphs import Fetched, Replay
from gptfast.kernels import ops
from gptfast.kernels.cuda.packing import WEIGHTS_PER_WORD, Kind, PackedWeight
from gptfast.kernels.cuda.tinygemm import TinygemmWeight
from gptfast.kernels.ops import KernelChoice, Kernels
from gptfast.linear import InductorMatrix, TinygemmMatrix, TritonEmbedding, TritonLinear, TritonMatrix
from gptfast.model import Transformer
from gptfast.replay import RecordedSteps
from gptfast.runner import Runner
from tests.reference.pretended_cuda import CodeGenerated, GeneratedCode, explain_absence, generate_code

pytestmark = pytest.mark.skipif(explain_absence() is not None, reason=str(explain_absence()))

N_LAYERS = 2
LENGTH = 8448
"""Slots of the cache: what the runner reserves at first, and room for padding."""
POSITION = 100
GROUP_SIZE = 128
MOST_LAUNCHES = 12
"""Of a layer."""
SMALLEST_MATRIX = 2048 * 2048
"""Elements of Llama 3.2 1B's `wo`; the other matrices of these models, and the caches, have more."""
OPERATORS = {
    "extern_kernels.addmm": 1,
    "extern_kernels.mm": 1,
    "torch.ops.aten._weight_int4pack_mm.default": 1,
    "torch.ops.aten._scaled_dot_product_efficient_attention.default": 1,
    "torch.ops.aten._scaled_dot_product_flash_attention.default": 1,
    "torch.ops.aten.view.dtype": 0,
    "torch.ops.gptfast.cuda_attention.default": 2,
    "torch.ops.gptfast.cuda_multiply_matrix.default": 2,
    "torch.ops.gptfast.cuda_multiply_rows.default": 1,
    "torch.ops.gptfast.cuda_multiply_vector.default": 1,
}
"""All that may be called beside what Inductor generates, and what each launches."""
GREEDY = SamplingConfig()
SAMPLED = SamplingConfig(temperature=0.8)

Case = Callable[[], None]
Weights = Literal["dense"] | Kind


def make_model(preset: str, weights: Weights, kernels: Kernels = "triton") -> Transformer:
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = Transformer(replace(PRESETS[preset], n_layers=N_LAYERS)).requires_grad_(False)
    torch.set_default_dtype(torch.float32)
    if weights != "dense":
        for name, module in list(model.named_modules()):
            if isinstance(module, nn.Linear | nn.Embedding):
                model.set_submodule(name, pack_layer(module, weights, kernels))
    return model


def pack_layer(layer: nn.Linear | nn.Embedding, kind: Kind, kernels: Kernels) -> nn.Module:
    """Integers of 8 bits have a scale for every row, those of 4 bits one for every group."""
    rows, columns = layer.weight.shape
    groups = {"int8": 1, "int4": columns // GROUP_SIZE}
    with layer.weight.device:
        words = torch.zeros(rows, columns // WEIGHTS_PER_WORD[kind], dtype=torch.int32)
        scales = torch.zeros(rows, groups[kind], dtype=torch.bfloat16) if kind in groups else None
        tiles = torch.zeros(rows // 8, columns // 128, 32, 4, dtype=torch.int32)
        scales_and_zeros = torch.zeros(groups["int4"], rows, 2, dtype=torch.bfloat16)
    make_matrix = InductorMatrix if kernels == "inductor" else TritonMatrix
    matrix: TritonMatrix | TinygemmMatrix = make_matrix(PackedWeight(kind, words, columns, scales), kind)
    if isinstance(layer, nn.Embedding):
        return TritonEmbedding(matrix, dtype=torch.bfloat16, exact_rows=False)
    if kernels == "torchao":
        matrix = TinygemmMatrix(TinygemmWeight(tiles, scales_and_zeros, GROUP_SIZE), kind)
    packed = TritonLinear([matrix], exact_rows=False)
    packed.bias = layer.bias
    return packed


class FirstRun:
    """A `GraphBackend` that ends where a step is compiled."""

    def record(self, function: Callable[[], None]) -> Replay:
        function()
        raise AssertionError("the step was not compiled")

    def fetch(self, source: Tensor) -> Fetched:
        raise AssertionError("no step was run")


def make_steps(
    preset: str, weights: Weights, rows: int, kv_dtype: torch.dtype | None, asked: KernelChoice = "auto"
) -> RecordedSteps:
    kernels = ops.choose_kernels(torch.device("cuda"), asked)
    assert kernels == ("triton" if asked == "auto" else asked)
    model = make_model(preset, weights, kernels)
    model.set_kernels(kernels)
    model.setup_caches(rows, LENGTH, kv_dtype)
    steps = RecordedSteps(model, rows, FirstRun(), compile_for_recording, CompileStatistics())
    steps.forget(last_pos=LENGTH - 1)
    return steps


def read(
    count: int,
    weights: Weights,
    preset: str = "llama-3.1-8b",
    *,
    rows: int = 1,
    kv_dtype: torch.dtype | None = None,
    kernels: KernelChoice = "auto",
) -> None:
    tokens = torch.zeros(rows, count, dtype=torch.int64, device="cuda")
    make_steps(preset, weights, rows, kv_dtype, kernels).read(tokens, POSITION)


def extend(sampling: SamplingConfig, weights: Weights) -> None:
    make_steps("llama-3.1-8b", weights, 1, None).get_extender(sampling.kind)


def take_round(sampling: SamplingConfig, size: int, weights: Weights) -> None:
    make_steps("llama-3.1-8b", weights, 1, None).get_round(sampling.kind, size)


def catch_up(sampling: SamplingConfig, weights: Weights) -> None:
    steps = make_steps("llama-3.2-1b", weights, 1, None)
    vocab_size = steps._model.config.vocab_size - 1
    state = make_text_state(steps, sampling, vocab_size)
    steps._extenders[sampling.kind, vocab_size] = state, lambda: None
    steps.get_catcher(sampling.kind, vocab_size)


def make_text_state(steps: RecordedSteps, sampling: SamplingConfig, vocab_size: int) -> TextState:
    """What `RecordedSteps` makes before it records, which cannot be had here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "_record", lambda function: None)
        return steps._record_extender(sampling.kind, vocab_size)[0]


def read_prompt(
    preset: str, weights: Weights = "int4", kernels: Kernels = "triton", *, sliding_window: int | None = None
) -> None:
    """The small step, for 32 tokens."""
    model = make_model(preset, weights, kernels)
    assert ops.choose_kernels(model.device) == "triton"
    model.set_kernels(kernels)
    model.sliding_window = sliding_window
    Runner(model, compile=True).warm_up(20)


def attend(count: int) -> None:
    runner = Runner(make_model("llama-3.1-8b", "dense"), compile=True, uses_graph_trees=True)
    tokens = torch.zeros(count, dtype=torch.int64, device="cuda")
    if count == 1:
        runner.decode(tokens, POSITION)
    else:
        runner.verify(tokens, POSITION)


STEPS: dict[str, Case] = {
    "read 1, dense": partial(read, 1, "dense"),
    "read 5, dense": partial(read, 5, "dense"),
    "read 5, int4": partial(read, 5, "int4"),
    "extend, int4": partial(extend, SAMPLED, "int4"),
    "read 1, int8 by inductor": partial(read, 1, "int8", kernels="inductor"),
}
SLOW_STEPS: dict[str, Case] = {
    "read 16, dense": partial(read, 16, "dense"),
    "read 1 in 4 rows, dense": partial(read, 1, "dense", rows=4),
    "read 1, dense, int8 cache": partial(read, 1, "dense", kv_dtype=torch.int8),
    "read 5, int4, int8 cache": partial(read, 5, "int4", kv_dtype=torch.int8),
    "read 1, int8": partial(read, 1, "int8"),
    "read 5, int8": partial(read, 5, "int8"),
    "read 1, bf16": partial(read, 1, "bf16"),
    "read 5, bf16": partial(read, 5, "bf16"),
    "read 5, int8 by inductor": partial(read, 5, "int8", kernels="inductor"),
    "read 1, int8 by inductor, tied head": partial(read, 1, "int8", "llama-3.2-1b", kernels="inductor"),
    "read 1, int8 by inductor, biases": partial(read, 1, "int8", "qwen2.5-7b", kernels="inductor"),
    "read 1, bf16 by inductor": partial(read, 1, "bf16", kernels="inductor"),
    "read 1, int4 by torchao": partial(read, 1, "int4", kernels="torchao"),
    "read 5, int4 by torchao": partial(read, 5, "int4", kernels="torchao"),
    "read 1, dense, tied head": partial(read, 1, "dense", "llama-3.2-1b"),
    "read 5, int4, tied head": partial(read, 5, "int4", "llama-3.2-1b"),
    "read 1, dense, biases": partial(read, 1, "dense", "qwen2.5-7b"),
    "read 5, int4, biases": partial(read, 5, "int4", "qwen2.5-7b"),
    "read 1, dense, norms of heads": partial(read, 1, "dense", "qwen3-8b"),
    "read 5, int4, norms of heads": partial(read, 5, "int4", "qwen3-8b"),
    "extend, greedy, dense": partial(extend, GREEDY, "dense"),
    "extend, filtered, int8": partial(extend, replace(SAMPLED, top_k=50, top_p=0.9), "int8"),
    "extend, penalty, int8": partial(extend, replace(SAMPLED, min_p=0.05, repetition_penalty=1.1), "int8"),
    "round of 1, int8": partial(take_round, GREEDY, 1, "int8"),
    "round of 4, int4": partial(take_round, SAMPLED, 4, "int4"),
    "round of 16, bf16": partial(take_round, replace(SAMPLED, top_p=0.9, repetition_penalty=1.1), 16, "bf16"),
    "catch up, int4": partial(catch_up, replace(SAMPLED, repetition_penalty=1.1), "int4"),
    "attend 1": partial(attend, 1),
    "attend 5": partial(attend, 5),
}
PROMPTS: dict[str, Case] = {
    "prompt": partial(read_prompt, "llama-3.1-8b"),
    "prompt, int8 by inductor": partial(read_prompt, "llama-3.1-8b", "int8", "inductor"),
    "prompt, int4 by torchao": partial(read_prompt, "llama-3.1-8b", "int4", "torchao"),
    "prompt, tied head": partial(read_prompt, "llama-3.2-1b"),
    "prompt with a window": partial(read_prompt, "llama-3.1-8b", sliding_window=4096),
}


def expand_codes(scales_dtype: torch.dtype) -> None:
    @torch.compile(fullgraph=True)
    def multiply(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        return F.linear(x, codes.to(x.dtype)) * scales

    with torch.device("cuda"):
        x, codes = torch.zeros(1, 5, 4096, dtype=torch.bfloat16), torch.zeros(6144, 4096, dtype=torch.int8)
        multiply(x, codes, torch.zeros(6144, dtype=scales_dtype))


def branch_on_value() -> None:
    step = torch.compile(lambda x: x + 1 if x.max() > 0 else x, fullgraph=True)
    step(torch.zeros(5, 4096, device="cuda"))


def read_value() -> None:
    step = torch.compile(lambda count: torch.ones(count.item(), device="cuda"), fullgraph=True)
    step(torch.ones((), dtype=torch.int64, device="cuda"))


def compute_on_host() -> None:
    step = torch.compile(lambda x, bias: x + bias.sin().to(x.device), fullgraph=True)
    step(torch.zeros(5, 4096, device="cuda"), torch.zeros(4096, device="cpu"))


def repeat_products() -> None:
    @torch.compiler.nested_compile_region
    def layer(x: Tensor, weight: Tensor) -> Tensor:
        for _ in range(MOST_LAUNCHES + 1):
            x = x @ weight
        return x

    step = torch.compile(lambda x, weight: layer(layer(x, weight), weight), fullgraph=True)
    step(torch.zeros(5, 4096, device="cuda"), torch.zeros(4096, 4096, device="cuda"))


def damage_kernel() -> None:
    try:
        read_value()
    except CodeGenerated as generated:
        kernels = {name: source.replace("tl.store(", "tl.stow(") for name, source in generated.code.kernels.items()}
        raise CodeGenerated(replace(generated.code, kernels=kernels)) from None


FAULTS: dict[str, Case] = {
    "dense copy": partial(expand_codes, torch.float32),
    "library's int8 product": partial(expand_codes, torch.bfloat16),
    "branch": branch_on_value,
    "value": read_value,
    "computation": compute_on_host,
    "many kernels": repeat_products,
    "damaged kernel": damage_kernel,
}
CASES = STEPS | SLOW_STEPS | PROMPTS | FAULTS


@cache
def generate_once(names: tuple[str, ...], compiles_all: bool = False) -> dict[str, GeneratedCode | str]:
    return generate_code(__name__, names, compiles_all=compiles_all)


def generate(name: str) -> GeneratedCode | str:
    """The code of a case or its error; those that run by default share a process."""
    return generate_once((name,))[name] if name in SLOW_STEPS | PROMPTS else generate_once((*STEPS, *FAULTS))[name]


def generate_step(name: str) -> GeneratedCode:
    code = generate(name)
    assert isinstance(code, GeneratedCode), code
    return code


def count_launches_per_layer(code: GeneratedCode) -> int:
    """Of the function of the wrapper that is called for every layer; all layers share one."""
    calls = [called for function in code.calls.values() for called in function]
    [layer] = [function for function in code.calls if calls.count(function) == N_LAYERS]
    return sum(OPERATORS.get(called, 1) for called in code.list_launches(layer))


def find_dense_copies(code: GeneratedCode) -> list[str]:
    return [buffer.name for buffer in code.buffers if buffer.elements >= SMALLEST_MATRIX]


def find_foreign_calls(code: GeneratedCode) -> set[str]:
    return set(code.list_launches()) - set(OPERATORS) - set(code.kernels)


def find_host_tensors(code: GeneratedCode) -> list[str]:
    devices = code.inputs | {buffer.name: buffer.device for buffer in code.buffers}
    return [name for name, device in devices.items() if device != "cuda:0"]


every_step = pytest.mark.parametrize(
    "name", [*STEPS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_STEPS)]
)


@every_step
def test_a_layer_is_a_few_launches(name: str) -> None:
    count = count_launches_per_layer(generate_step(name))
    assert 5 <= count <= MOST_LAUNCHES  # it has four products and attention


@every_step
def test_no_buffer_is_as_large_as_a_matrix(name: str) -> None:
    code = generate_step(name)
    assert code.buffers
    assert find_dense_copies(code) == []


@every_step
def test_nothing_but_kernels_and_known_operators_is_called(name: str) -> None:
    code = generate_step(name)
    assert code.kernels
    assert find_foreign_calls(code) == set()
    assert "_weight_int8pack_mm" not in code.wrapper


@every_step
def test_nothing_is_on_the_host(name: str) -> None:
    code = generate_step(name)
    assert code.inputs
    assert find_host_tensors(code) == []


@every_step
def test_every_kernel_compiles(name: str) -> None:
    code = generate_step(name)
    assert code.broken == {}
    assert set(code.compiled) == set(code.kernels)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROMPTS)
def test_a_prompt_attends_by_flash_attention_where_that_has_its_mask(name: str) -> None:
    code = generate_step(name)
    launches = code.list_launches()
    assert ("torch.ops.aten._scaled_dot_product_flash_attention.default" in launches) == ("window" not in name)
    assert ("torch.ops.aten._scaled_dot_product_efficient_attention.default" in launches) == ("window" in name)
    assert find_dense_copies(code) == []
    assert find_foreign_calls(code) == set()
    assert find_host_tensors(code) == []
    assert code.broken == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_every_kernel_compiles_in_all_configurations(name: str) -> None:
    code = generate_once((name,), compiles_all=True)[name]
    assert isinstance(code, GeneratedCode), code
    assert code.broken == {}
    assert sum(code.compiled.values()) > len(code.kernels)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SLOW_STEPS if name.startswith("attend")])
def test_a_step_that_torch_records_is_not_split(name: str) -> None:
    assert generate_step(name).calls["call"].count("partition_0") == 1
    assert "partition_1" not in generate_step(name).calls


def test_many_kernels_in_a_layer_are_seen() -> None:
    assert count_launches_per_layer(generate_step("many kernels")) == MOST_LAUNCHES + 1


def test_a_dense_copy_of_a_quantized_matrix_is_seen() -> None:
    assert find_dense_copies(generate_step("dense copy")) == ["buf0"]


def test_the_librarys_int8_product_is_seen() -> None:
    assert find_foreign_calls(generate_step("library's int8 product")) == {"extern_kernels._weight_int8pack_mm"}


def test_a_value_that_the_host_needs_is_seen() -> None:
    assert any(called.endswith(".item") for called in find_foreign_calls(generate_step("value")))
    assert "Data-dependent branching" in str(generate("branch"))


def test_what_is_done_on_the_host_is_seen() -> None:
    code = generate_step("computation")
    assert find_host_tensors(code) == ["arg0_1", "buf0"]
    assert any(called.startswith("cpp_fused") for called in find_foreign_calls(code))


def test_a_kernel_that_does_not_compile_is_seen() -> None:
    code = generate_step("damaged kernel")
    assert set(code.broken) == set(code.kernels)
    assert all("has no attribute 'stow'" in reason for reason in code.broken.values())
