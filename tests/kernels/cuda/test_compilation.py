"""The products compiled for GPUs that are not there: registers, loads and instructions of every configuration."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gptfast.kernels.cuda import ops
from gptfast.kernels.cuda.configurations import (
    THREADS,
    Configuration,
    TunedConfiguration,
    Tuning,
    choose_configuration,
    count_words,
    load_shipped,
)
from gptfast.kernels.cuda.packing import WEIGHTS_PER_WORD, Kind
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

linear = pytest.importorskip("gptfast.kernels.cuda.linear", reason="Triton is not installed", exc_type=ImportError)

SHIPPED = (load_shipped("sm_90") or Tuning()).products
"""Other GPUs have no file yet, and get what the rule says."""
TUNED_FOR = 90
STREAMED = r"LDG\.E\.EF"
WIDE = r"(LDG\.E\.EF|LDGSTS\.E\.BYPASS\S*)\.128"


def make_line(
    kind: Kind, several_rows: bool, out_features: int, in_features: int, group_size: int = 0
) -> TunedConfiguration:
    """A product with what the rule says."""
    rows = 5 if several_rows else 1
    configuration = choose_configuration(kind, rows, out_features, in_features, group_size)
    return TunedConfiguration(kind, several_rows, out_features, in_features, group_size, configuration)


def make_launch(line: TunedConfiguration, *, has_mins: bool = False) -> Launch:
    """The product as it is launched for activations in bfloat16, or with a matrix in float16 in that."""
    words = torch.empty(line.out_features, count_words(line.kind, line.in_features), dtype=torch.int32, device="meta")
    groups = line.in_features // line.group_size if line.group_size else 1
    scales = None if line.kind in ("bf16", "fp16") else torch.empty(line.out_features, groups, device="meta")
    matrix = ops.view_elements(words, line.kind) if line.several_rows else words
    constants = ops.list_constants(line.kind, matrix, scales, scales if has_mins else None, line.configuration)
    activations = "fp16" if line.kind == "fp16" else "bf16"
    arguments = {
        "out": f"*{activations}",
        "x": f"*{activations}" if line.several_rows else "*fp32",
        "words": "*i32" if matrix is words else f"*{activations}",
        "scales": None if scales is None else "*bf16",
        "mins": "*bf16" if has_mins else None,
        "bias": None,
        "N": line.out_features,
        **constants,
    }
    operand = "tl.float16" if activations == "fp16" else "tl.bfloat16"
    if line.several_rows:
        arguments |= {"M": 5, "operand": operand, "splits": line.configuration.splits}
    else:
        arguments |= {"magic": linear.MAGIC}
    name = "multiply_rows" if line.several_rows else "multiply_vector"
    configuration = line.configuration
    return Launch(f"gptfast.kernels.cuda.linear:{name}", arguments, configuration.warps, configuration.stages)


def count_weights(line: TunedConfiguration) -> float:
    """Those that a thread multiplies in all, the padding of its last block included."""
    configuration = line.configuration
    block = configuration.block_words * WEIGHTS_PER_WORD[line.kind]
    if line.several_rows and line.kind in ("bf16", "fp16"):
        block = configuration.block_words
    block *= configuration.splits
    width = -(-line.in_features // block) * block
    return configuration.block_rows * width / (THREADS * configuration.warps)


def measure_instructions(line: TunedConfiguration, program: Program) -> float:
    """Instructions per weight, those before and after the loop shared out among all."""
    if not line.several_rows:
        marker, weights = STREAMED + r"\.128", 4 * WEIGHTS_PER_WORD[line.kind]
    else:
        # A matrix of 16 by 16 weights takes two of a warp's instructions, one of 64 by 16 one of a warpgroup's.
        marker, weights = TENSOR_CORE, 8 if program.count("HGMMA") else 4
    return program.count_executed(marker, count_weights(line) / weights) / count_weights(line)


def check(line: TunedConfiguration, program: Program, *, has_mins: bool = False) -> None:
    """What the design asks of every product."""
    program.assert_keeps_to_registers()
    assert not program.count("I2F"), "integers become floats by their bits alone"
    assert not program.count(r"\w+\.FTZ"), "small floats are made of bits, and must not become zero"
    assert program.count(WIDE), "weights are loaded 16 bytes at a time"
    assert program.shared_bytes < 100_000
    if line.several_rows:
        assert program.count(TENSOR_CORE)
        if line.configuration.splits == 4:
            assert program.count("LDGSTS") == program.count(WIDE), "neither weights nor inputs are loaded in other ways"
        assert not count_instructions(program.loop, r"STS|STSM|LDSM\.16\.MT88") or line.group_size or has_mins
    else:
        steps = count_weights(line) / WEIGHTS_PER_WORD[line.kind] / 4
        loads = count_instructions(program.loop, STREAMED + r"\.128") or program.count(STREAMED + r"\.128")
        is_even = count_words(line.kind, line.in_features) % line.configuration.block_words == 0
        assert steps % loads == 0 or not is_even, "weights are not loaded in other ways too"
        others = program.count(STREAMED) - program.count(STREAMED + r"\.128")
        assert others <= loads * (1 + has_mins), "a thread loads one scale for its 16 bytes"
        sums = line.configuration.block_rows * line.configuration.warps
        assert program.shared_bytes <= 4 * sums, "warps exchange nothing but their sums"
    if program.architecture == TUNED_FOR:
        bound = line.max_instructions_per_weight
        assert bound is None or measure_instructions(line, program) <= bound


def check_all(lines: list[TunedConfiguration], architectures: tuple[int, ...] = ARCHITECTURES) -> None:
    for line, programs in zip(
        lines, compile_offline([make_launch(line) for line in lines], architectures), strict=True
    ):
        for program in programs.values():
            check(line, program)


def get_shipped(*keys: tuple[str, bool, int]) -> list[TunedConfiguration]:
    """The lines of an 8B model's first projection, of these kinds, for one or several rows, and of these groups."""
    return [
        line
        for line in SHIPPED
        if (line.kind, line.several_rows, line.group_size) in keys
        and (line.out_features, line.in_features) == (6144, 4096)
    ]


def test_products_of_common_kinds_are_compiled_well() -> None:
    keys = [("bf16", False, 0), ("int8", False, 0), ("int4", False, 128), ("bf16", True, 0), ("int4", True, 128)]
    lines = get_shipped(*keys)
    assert len(lines) == len(keys)
    check_all(lines)


def test_a_spill_is_seen() -> None:
    line = make_line("int4", True, 28_672, 4096)
    large = dataclasses.replace(line, configuration=Configuration(64, 64, 2, 3))
    (programs,) = compile_offline([make_launch(large)], (90,))
    with pytest.raises(AssertionError):
        programs[90].assert_keeps_to_registers()


@pytest.mark.slow
@pytest.mark.parametrize("several_rows", [False, True])
@pytest.mark.parametrize("kind", WEIGHTS_PER_WORD)
def test_every_shipped_product_is_compiled_well(kind: Kind, several_rows: bool) -> None:
    lines = [line for line in SHIPPED if (line.kind, line.several_rows) == (kind, several_rows)]
    if kind == "fp16":
        lines = [make_line(kind, several_rows, 4096, 4096)]
    # The number of rows is no constant of the kernel.
    distinct = {(line.in_features, line.group_size, line.configuration): line for line in lines}
    assert distinct
    check_all(list(distinct.values()))


@pytest.mark.slow
@pytest.mark.parametrize("several_rows", [False, True])
@pytest.mark.parametrize(
    ("kind", "group_size"), [("int4", 32), ("int4", 128), ("int4", 0), ("int8", 32), ("int8", 128)]
)
def test_products_with_mins_are_compiled_well(kind: Kind, group_size: int, several_rows: bool) -> None:
    lines = [make_line(kind, several_rows, 4096, in_features, group_size) for in_features in (4096, 14_336)]
    compiled = compile_offline([make_launch(line, has_mins=True) for line in lines])
    for line, programs in zip(lines, compiled, strict=True):
        for program in programs.values():
            check(line, program, has_mins=True)


@pytest.mark.slow
@pytest.mark.parametrize("several_rows", [False, True])
@pytest.mark.parametrize(("out_features", "in_features"), [(32_001, 288), (65, 576), (1536, 1536), (4096, 11_008)])
def test_products_of_odd_shapes_are_compiled_well(out_features: int, in_features: int, several_rows: bool) -> None:
    kinds: list[tuple[Kind, int]] = [("bf16", 0), ("int8", 0), ("int8", 16), ("int4", 32)]
    check_all([make_line(kind, several_rows, out_features, in_features, group) for kind, group in kinds])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bf16", "int8", "int4"])
def test_inputs_in_float32_fit_into_shared_memory(kind: Kind) -> None:
    line = make_line(kind, True, 2048, 4096)
    launch = make_launch(line)
    arguments = {**launch.arguments, "x": "*fp32", "out": "*fp32", "operand": "tl.float32"}
    stages = ops.count_stages(line.configuration, torch.float32)
    (programs,) = compile_offline([dataclasses.replace(launch, arguments=arguments, stages=stages)])
    for program in programs.values():
        program.assert_keeps_to_registers()
        assert program.shared_bytes < 100_000


@pytest.mark.slow
@pytest.mark.parametrize("has_mins", [False, True])
@pytest.mark.parametrize(("kind", "group_size"), [("fp8", 0), ("int8", 0), ("int8", 16), ("int4", 32), ("int4", 128)])
def test_a_matrix_is_expanded_16_bytes_at_a_time(kind: Kind, group_size: int, has_mins: bool) -> None:
    rows, columns = 6144, 4096
    words = torch.empty(rows, count_words(kind, columns), dtype=torch.int32, device="meta")
    scales = torch.empty(rows, columns // (group_size or columns), device="meta")
    constants = ops.list_constants(kind, words, scales, scales if has_mins else None, ops.EXPANDED)
    del constants["even_rows"]
    pointers = {"out": "*bf16", "words": "*i32", "scales": "*bf16", "mins": "*bf16" if has_mins else None}
    launch = Launch("gptfast.kernels.cuda.linear:expand_rows", {**pointers, "N": rows, **constants}, ops.EXPANDED.warps)
    (programs,) = compile_offline([launch])
    for program in programs.values():
        program.assert_keeps_to_registers()
        assert program.count(r"LDG\.E\.128") == 1
        assert program.count("STG") == program.count(r"STG\.E\.128") > 0


LAUNCH = """
import sys
from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from gptfast.kernels.cuda import linear, ops
from gptfast.kernels.cuda.packing import arrange_inputs, arrange_rows, pack
from tests.reference.quantized_weights import draw_quantized
from tests.reference.triton_compilation import disassemble

target = GPUTarget("cuda", 90, 32)
driver.set_active(
    SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device: 0
    )
)
kernel = linear.multiply_rows if sys.argv[1] == "True" else linear.multiply_vector
run, compiled = kernel.run, []
kernel.run = lambda *args, **options: compiled.append(run(*args, **(options | {"warmup": True})))
weight = pack(draw_quantized(6144, 4096, 4, 128))
tensors = weight.words, weight.scales, weight.mins, None, weight.kind
x = torch.zeros(5, 4096, dtype=torch.bfloat16)
if kernel is linear.multiply_rows:
    ops.multiply_rows(arrange_rows(x, weight.kind).contiguous(), *tensors)
else:
    ops.multiply_vector(arrange_inputs(x[:1], weight.kind).contiguous(), *tensors, x.dtype)
print(disassemble(compiled[0].asm["cubin"], 90, 0).assembly)
"""


@pytest.mark.slow
@pytest.mark.parametrize("several_rows", [False, True])
def test_what_is_compiled_here_is_what_a_launch_compiles(several_rows: bool) -> None:
    outcome = run_process("-c", LAUNCH, str(several_rows), TRITON_INTERPRET="0", **make_environment())
    assert outcome.exit_code == 0, outcome.stderr
    launched = Program(90, 0, 0, 0, 0, outcome.stdout)
    (programs,) = compile_offline([make_launch(make_line("int4", several_rows, 6144, 4096, 128))], (90,))
    assert launched.instructions == programs[90].instructions
    assert len(launched.instructions) > 100
