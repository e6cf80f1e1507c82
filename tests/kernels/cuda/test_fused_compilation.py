"""The fused step's products compiled for GPUs that are not there: what is loaded when, registers and instructions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from gptfast.kernels.cuda import fused_ops
from gptfast.kernels.cuda.configurations import THREADS, count_words
from gptfast.kernels.cuda.packing import WEIGHTS_PER_WORD, Kind, PackedWeight
from tests.reference.sessions import run_process
from tests.reference.triton_compilation import (
    ARCHITECTURES,
    TENSOR_CORE,
    Launch,
    Program,
    compile_offline,
    count_instructions,
    make_environment,
)

fused = pytest.importorskip("gptfast.kernels.cuda.fused", reason="Triton is not installed", exc_type=ImportError)

WEIGHTS = r"LDG\.E\.EF\.128"
MEMORY = r"(LD|ST|ATOM|RED|CCTL)(?!C)"
DEPENDENT = (90, 100)
"""Architectures on which a kernel may start before the one before it ends."""
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int32: "*i32"} | {
    torch.int64: "*i64"
}


@dataclass(frozen=True)
class Sizes:
    """Of a model."""

    dim: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab_size: int


LLAMA_8B = Sizes(4096, 32, 8, 128, 14_336, 128_256)
LLAMA_1B = Sizes(2048, 32, 8, 64, 8192, 128_256)
SMOLLM2_135M = Sizes(576, 9, 3, 64, 1536, 49_152)
NAMES = ("wqkv", "wo", "w13", "w2", "head")
BOUNDS: dict[Kind, tuple[float, ...]] = {
    "bf16": (4.8, 4.2, 4.4, 3.7, 4.0),
    "fp16": (6.4, 5.8, 6.0, 5.1, 5.6),
    "fp8": (6.5, 6.0, 6.2, 5.0, 5.8),
    "int8": (6.2, 5.6, 5.8, 4.6, 5.4),
    "int4": (4.5, 4.3, 4.3, 3.1, 3.9),
}
"""Instructions per weight on sm_90 at 8B of the products in the order of `NAMES`, for one row: 4 % above Triton 3.6."""
BOUNDS_OF_ROWS: dict[Kind, float] = {"bf16": 3.1, "fp16": 3.1, "fp8": 8.8, "int8": 7.3, "int4": 8.2}
"""For several, of each product."""


def make_weight(kind: Kind, out_features: int, in_features: int, group_size: int, *, has_mins: bool) -> PackedWeight:
    """A matrix that has no memory."""
    words = torch.empty(out_features, count_words(kind, in_features), dtype=torch.int32, device="meta")
    groups = in_features // (group_size or in_features)
    scales = torch.empty(out_features, groups, dtype=torch.bfloat16, device="meta")
    is_dense = kind in ("bf16", "fp16")
    return PackedWeight(kind, words, in_features, None if is_dense else scales, scales if has_mins else None)


def make_launches(
    sizes: Sizes, kind: Kind, group_size: int, rows: int, *, pdl: bool, has_mins: bool = False
) -> dict[str, Launch]:
    """The products of a step, as they would be launched for activations in bfloat16."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    dim, heads, kv_heads, head_dim = sizes.dim, sizes.n_heads, sizes.n_kv_heads, sizes.head_dim
    shapes = ((heads + 2 * kv_heads) * head_dim, dim), (dim, heads * head_dim), (2 * sizes.ffn_dim, dim)
    weights = {
        name: make_weight(kind, *shape, group_size, has_mins=has_mins)
        for name, shape in zip(NAMES, (*shapes, (dim, sizes.ffn_dim), (sizes.vocab_size, dim)), strict=True)
    }
    inputs = {
        name: fused_ops.make_inputs(
            weights[name],
            rows,
            torch.bfloat16,
            exact_rows=False,
            follows=weights[before] if before else None,
            is_normed=before is not None,
        )
        for name, before in (("wqkv", "w2"), ("wo", None), ("w13", "wo"), ("w2", None), ("head", "w2"))
    }
    angles = empty(8192, head_dim // 2, dtype=torch.float32)
    cache = empty(1, kv_heads, 8192, head_dim)
    q, positions = empty(1, rows, heads, head_dim), empty(rows, dtype=torch.int64)
    x, gains, logits = empty(rows, dim), empty(dim), empty(rows, sizes.vocab_size, dtype=torch.float32)
    calls: dict[str, Callable[[Any, PackedWeight], None]] = {
        "wqkv": lambda x1, w: fused_ops.project_qkv(
            q, x1, 1e-5, w, None, angles, angles, positions, cache, cache, pdl=pdl
        ),
        "wo": lambda x1, w: fused_ops.add_product(x, inputs["w13"], gains, x1, w, None, pdl=pdl),
        "w13": lambda x1, w: fused_ops.project_swiglu(inputs["w2"], x1, 1e-5, w, pdl=pdl),
        "w2": lambda x1, w: fused_ops.add_product(x, inputs["head"], gains, x1, w, None, pdl=pdl),
        "head": lambda x1, w: fused_ops.project_head(logits, x1, 1e-5, w, pdl=pdl),
    }
    return {name: record_launch(lambda name=name: calls[name](inputs[name], weights[name])) for name in NAMES}  # type: ignore[misc]


class Recorder:
    """Takes a kernel's place and keeps what it would have been launched with."""

    def __init__(self, name: str, launches: list[Launch]) -> None:
        self.name, self.launches = name, launches
        self.parameters = list(inspect.signature(getattr(fused, name).fn).parameters)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self.record

    def record(self, *values: Any, **options: Any) -> None:
        options |= zip(self.parameters, values, strict=False)
        warps, stages = options.pop("num_warps"), options.pop("num_stages")
        assert options.pop("launch_pdl", False) == options.get("pdl", False)
        assert options.pop("enable_fp_fusion")
        arguments = {
            name: TYPES[value.dtype] if isinstance(value, Tensor) else value for name, value in options.items()
        }
        if arguments.get("operand") is not None:
            arguments["operand"] = "tl.bfloat16"
        self.launches.append(Launch(f"gptfast.kernels.cuda.fused:{self.name}", arguments, warps, stages))


def record_launch(call: Callable[[], None]) -> Launch:
    """What a call would launch."""
    launches: list[Launch] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("embed", "project_qkv", "add_product", "project_swiglu", "project_head"):
            patch.setattr(fused, name, Recorder(name, launches))
        call()
    (launch,) = launches
    return launch


def measure_instructions(launch: Launch, program: Program, kind: Kind) -> float:
    """Instructions per weight, those before and after the loop shared out among all."""
    constants = launch.arguments
    width = constants["splits"] * constants["block_words"] * constants["P"]
    width = -(-constants["W"] * constants["P"] // width) * width
    weights = constants["block_rows"] * width / (THREADS * launch.warps)
    if constants["is_vector"]:
        pattern, each = WEIGHTS, 4 * WEIGHTS_PER_WORD[kind]
    else:
        pattern, each = TENSOR_CORE, 8 if program.count("HGMMA") else 4
    return program.count_executed(pattern, weights / each) / weights


def check(launch: Launch, program: Program) -> None:
    """What the design asks of every product."""
    constants = launch.arguments
    program.assert_keeps_to_registers()
    assert not program.count("I2F"), "integers become floats by their bits alone"
    assert not program.count(r"\w+\.FTZ"), "small floats are made of bits, and must not become zero"
    assert program.shared_bytes < 100_000
    if constants["is_vector"]:
        assert program.count(WEIGHTS)
        assert not program.count(TENSOR_CORE)
        assert not count_instructions(program.loop, "STS|LDS|BAR|SHFL"), "warps exchange nothing but their sums"
        sums = 4 * max(constants["block_rows"], 2) * launch.warps
        # Of 8 rows in 2 warps with groups of 32, the compiler arranges a thread's sums anew before it adds them up.
        is_arranged_anew = constants["block_rows"] == 8 and launch.warps == 2 and constants["W"] == 4 * constants["G"]
        assert program.shared_bytes <= (1024 if is_arranged_anew else sums)
    else:
        assert program.count(TENSOR_CORE)
        assert program.count(r"LDGSTS\.E\.BYPASS\S*\.128")
    if program.architecture in DEPENDENT and constants["pdl"]:
        check_waiting(launch, program)
    else:
        assert not program.count("ACQBULK|PREEXIT")


def check_waiting(launch: Launch, program: Program) -> None:
    """The next kernel may start first, then weights are loaded, and all else after the wait, which is in no loop."""
    assert program.count("ACQBULK") == program.count("PREEXIT") == 1
    assert not count_instructions(program.loop, "ACQBULK")
    names = [each.name for each in program.instructions]
    start, wait = names.index("PREEXIT"), names.index("ACQBULK")
    assert start < wait
    assert not count_instructions(program.instructions[:start], MEMORY)
    before = program.instructions[start:wait]
    assert count_instructions(before, MEMORY) == count_instructions(before, r"LDG\.E\.EF|CCTL"), "constants alone"
    constants = launch.arguments
    if constants["is_vector"]:
        loads = constants["block_rows"] * constants["block_words"] / (4 * THREADS * launch.warps)
        assert count_instructions(before, WEIGHTS) == loads
    else:
        assert count_instructions(before, "CCTL"), "the second-level cache is asked for the first weights"


def check_all(
    sizes: Sizes,
    kinds: Iterable[tuple[Kind, int]],
    rows: int,
    *,
    names: Iterable[str] = NAMES,
    architectures: tuple[int, ...] = ARCHITECTURES,
    pdl: bool = True,
    has_mins: bool = False,
) -> None:
    """Compile products of a model and check them, and where there is a bound, their instructions."""
    for kind, group_size in kinds:
        launches = make_launches(sizes, kind, group_size, rows, pdl=pdl, has_mins=has_mins)
        launches = {name: launches[name] for name in names}
        compiled = compile_offline(list(launches.values()), architectures)
        for (name, launch), programs in zip(launches.items(), compiled, strict=True):
            for architecture, program in programs.items():
                check(launch, program)
                if architecture == 90 and sizes == LLAMA_8B and not has_mins:
                    bound = BOUNDS_OF_ROWS[kind] if rows > 1 else BOUNDS[kind][NAMES.index(name)]
                    assert measure_instructions(launch, program, kind) <= bound, (kind, group_size, name)


def test_common_products_are_compiled_well() -> None:
    check_all(LLAMA_8B, [("int4", 128)], 1, names=("wqkv", "w2"), architectures=(90,))


@pytest.mark.slow
def test_other_common_products_are_compiled_well() -> None:
    check_all(LLAMA_1B, [("bf16", 0)], 1, names=("w13",), architectures=(90,))
    check_all(LLAMA_8B, [("int8", 0)], 5, names=("wo",), architectures=(90,))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("sizes", [LLAMA_8B, LLAMA_1B, SMOLLM2_135M])
@pytest.mark.parametrize(
    ("kind", "group_size"),
    [("bf16", 0), ("fp16", 0), ("fp8", 0), ("int8", 0), ("int8", 32), ("int4", 32), ("int4", 64)],
)
def test_products_of_common_models_are_compiled_well(kind: Kind, group_size: int, sizes: Sizes, rows: int) -> None:
    check_all(sizes, [(kind, group_size)], rows, architectures=DEPENDENT)
    check_all(sizes, [(kind, group_size)], rows, architectures=(80,), pdl=False)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(("kind", "group_size"), [("int8", 128), ("int4", 64), ("int4", 128)])
def test_products_with_long_groups_are_compiled_well(kind: Kind, group_size: int, rows: int) -> None:
    for sizes in (LLAMA_8B, LLAMA_1B):
        check_all(sizes, [(kind, group_size)], rows, architectures=DEPENDENT)
        check_all(sizes, [(kind, group_size)], rows, architectures=(80,), pdl=False)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(("kind", "group_size"), [("int4", 32), ("int4", 128), ("int8", 32), ("int8", 0)])
def test_products_with_mins_are_compiled_well(kind: Kind, group_size: int, rows: int) -> None:
    check_all(LLAMA_8B, [(kind, group_size)], rows, architectures=DEPENDENT, has_mins=True)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(
    ("kind", "group_size", "has_mins"),
    [(None, 0, False), ("bf16", 0, False), ("int8", 0, False), ("int4", 32, False), ("int4", 128, True)],
)
def test_embeddings_are_compiled_well(kind: Kind | None, group_size: int, has_mins: bool, rows: int) -> None:
    """Packed ones, and a tensor."""
    launch = make_embedding_launch(LLAMA_1B, kind, group_size, rows, has_mins=has_mins)
    assert launch.arguments["is_vector"] == (rows == 1)
    (programs,) = compile_offline([launch])
    for program in programs.values():
        program.assert_keeps_to_registers()
        assert program.shared_bytes < 100_000
        assert not program.count("ACQBULK|PREEXIT"), "what comes before a step may be no kernel"


def make_embedding_launch(sizes: Sizes, kind: Kind | None, group_size: int, rows: int, *, has_mins: bool) -> Launch:
    """The kernel that begins a step, for activations in bfloat16; without a kind, of a tensor in that."""
    dim, vocab = sizes.dim, sizes.vocab_size
    following = make_weight(kind or "bf16", 3 * dim // 2, dim, group_size, has_mins=has_mins)
    inputs = fused_ops.make_inputs(following, rows, torch.bfloat16, exact_rows=False, is_normed=True)
    x, gains = (torch.empty(*shape, dtype=torch.bfloat16, device="meta") for shape in ((rows, dim), (dim,)))
    tokens = torch.empty(rows, dtype=torch.int64, device="meta")
    table: PackedWeight | Tensor
    if kind is None:
        table = torch.empty(vocab, dim, dtype=torch.bfloat16, device="meta")
    else:
        table = make_weight(kind, vocab, dim, group_size, has_mins=has_mins)
    return record_launch(lambda: fused_ops.embed(x, inputs, gains, tokens, table))


LAUNCH = """
import sys
from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from gptfast.kernels.cuda import fused, fused_ops
from gptfast.kernels.cuda.packing import PackedWeight
from tests.reference.triton_compilation import disassemble

target = GPUTarget("cuda", 90, 32)
driver.set_active(
    SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device: 0
    )
)
kernel = fused.project_qkv
run, compiled = kernel.run, []
kernel.run = lambda *args, **options: compiled.append(run(*args, **(options | {"warmup": True})))
rows, dtype = int(sys.argv[1]), torch.bfloat16
weight = PackedWeight("int4", torch.zeros(3072, 256, dtype=torch.int32), 2048, torch.ones(3072, 16, dtype=dtype))
following = PackedWeight("int4", torch.zeros(2048, 1024, dtype=torch.int32), 8192, torch.ones(2048, 64, dtype=dtype))
inputs = fused_ops.make_inputs(weight, rows, dtype, exact_rows=False, follows=following, is_normed=True)
q, cache = torch.zeros(1, rows, 32, 64, dtype=dtype), torch.zeros(1, 8, 8192, 64, dtype=dtype)
angles, positions = torch.zeros(8192, 32), torch.arange(rows)
fused_ops.project_qkv(q, inputs, 1e-5, weight, None, angles, angles, positions, cache, cache, pdl=True)
assert compiled[0].metadata.launch_pdl
print(disassemble(compiled[0].asm["cubin"], 90, 0).assembly)
"""


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 5])
def test_what_is_compiled_here_is_what_a_launch_compiles(rows: int) -> None:
    outcome = run_process("-c", LAUNCH, str(rows), TRITON_INTERPRET="0", **make_environment())
    assert outcome.exit_code == 0, outcome.stderr
    launched = Program(90, 0, 0, 0, 0, outcome.stdout)
    launch = make_launches(LLAMA_1B, "int4", 128, rows, pdl=True)["wqkv"]
    (programs,) = compile_offline([launch], (90,))
    assert launched.instructions == programs[90].instructions
    assert len(launched.instructions) > 100
