"""Compile Triton kernels for GPUs that are not there, and read what came of it: resources and machine instructions.

Triton compiles in a process of its own, as this one may run kernels under its interpreter, and as it may be another
version: that in the directory that `GPTFAST_TEST_TRITON` names (`pip install --target`). What a launch would tell the
compiler about its arguments (which pointers and numbers are multiples of 16) is told here by the same rules.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

VERSION_VARIABLE = "GPTFAST_TEST_TRITON"
ARCHITECTURES = (80, 90, 100)
TENSOR_CORE = r"HMMA|HGMMA|QGMMA|UTC\w*MMA"
SPILL = r"(STL|LDL)\b"


@dataclass(frozen=True)
class Launch:
    """A kernel with what it is compiled for.

    Attributes:
        kernel: as `package.module:function`.
        arguments: all of the kernel's by name. A string is a pointer's type, as `*bf16`; None an argument left out; a
            number itself; of the constants whatever they are, types as `tl.float16`.
        warps, stages: as in a launch.
        fuses: whether a product and a sum may become one instruction, with one rounding.
    """

    kernel: str
    arguments: Mapping[str, Any]
    warps: int
    stages: int = 1
    fuses: bool = True


@dataclass(frozen=True)
class Instruction:
    """A machine instruction: its address, its name with modifiers, and its text."""

    address: int
    name: str
    text: str


@dataclass(frozen=True)
class Program:
    """A compiled kernel: bytes of stack and local memory of a thread, of shared memory of a block, and its code."""

    architecture: int
    registers: int
    stack_bytes: int
    local_bytes: int
    shared_bytes: int
    assembly: str

    @cached_property
    def instructions(self) -> list[Instruction]:
        """In the order of their addresses, without the padding at the end."""
        lines = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)([^;]*);", self.assembly, re.M)
        found = [Instruction(int(address, 16), name, name + rest) for address, name, rest in lines]
        while found and found[-1].name == "NOP":
            found.pop()
        return found

    @cached_property
    def loop(self) -> list[Instruction]:
        """The longest run of instructions that a branch backward repeats; none if there is no loop."""
        spans = [
            (int(target, 16), each.address)
            for each in self.instructions
            if each.name.startswith("BRA")
            for target in re.findall(r"\b0x([0-9a-f]+)", each.text)[-1:]
            if int(target, 16) < each.address
        ]
        if not spans:
            return []
        start, end = max(spans, key=lambda span: span[1] - span[0])
        return [each for each in self.instructions if start <= each.address <= end]

    def count(self, pattern: str) -> int:
        """Instructions whose name begins with the pattern."""
        return count_instructions(self.instructions, pattern)

    def count_executed(self, pattern: str, times: float) -> float:
        """Instructions that a thread executes if those whose name begins with the pattern are `times` of them.

        The loop is repeated as often as that takes, and all else runs once.
        """
        in_loop = count_instructions(self.loop, pattern)
        repetitions = (times - self.count(pattern) + in_loop) / in_loop if in_loop else 0
        return len(self.instructions) - len(self.loop) + repetitions * len(self.loop)

    def assert_keeps_to_registers(self) -> None:
        """Nothing is spilled to memory: what the assembler says of itself does not suffice."""
        assert (self.stack_bytes, self.local_bytes) == (0, 0)
        assert not self.count(SPILL)


def count_instructions(instructions: Sequence[Instruction], pattern: str) -> int:
    """Those whose name begins with the pattern."""
    return sum(re.match(pattern, each.name) is not None for each in instructions)


def compile_offline(
    launches: Sequence[Launch], architectures: Sequence[int] = ARCHITECTURES
) -> list[dict[int, Program]]:
    """For every launch, the program of each architecture; the test is skipped where there is no Triton."""
    request = {"launches": [asdict(launch) for launch in launches], "architectures": architectures}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment |= make_environment()
    outcome = subprocess.run(
        [sys.executable, __file__], input=json.dumps(request), capture_output=True, text=True, env=environment
    )
    if outcome.returncode == MISSING:
        pytest.skip(outcome.stderr.strip())
    assert outcome.returncode == 0, outcome.stderr[-4000:]
    return [
        {int(architecture): Program(**program) for architecture, program in programs.items()}
        for programs in json.loads(outcome.stdout)
    ]


def make_environment() -> dict[str, str]:
    """Where a process finds the Triton to compile with, and this package."""
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    if other := os.environ.get(VERSION_VARIABLE):
        assert (Path(other) / "triton").is_dir(), f"{VERSION_VARIABLE} is {other}, where there is no Triton"
        paths.insert(0, str(Path(other).resolve()))
    return {"PYTHONPATH": os.pathsep.join(paths)}


MISSING = 77
"""The exit code of the process below where there is no Triton."""


def compile_launch(launch: Launch, architecture: int) -> Program:
    """Compile for one architecture; in the process that has Triton."""
    import importlib

    import triton.language as tl
    from triton import compile as compile_source
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, _, name = launch.kernel.partition(":")
    kernel = getattr(importlib.import_module(module), name)
    assert set(launch.arguments) == {parameter.name for parameter in kernel.params}
    signature, constants, hints = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = launch.arguments[parameter.name]
        signature[parameter.name] = "constexpr"
        if parameter.is_constexpr or value is None:
            is_type = isinstance(value, str) and value.startswith("tl.")
            constants[(index,)] = getattr(tl, value.removeprefix("tl.")) if is_type else value
            continue
        is_pointer = isinstance(value, str)
        if value == 1 and not parameter.do_not_specialize:
            constants[(index,)] = value
            continue
        signature[parameter.name] = value if is_pointer else "i32"
        is_told = not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment)
        if is_told and (is_pointer or value % 16 == 0):
            hints[(index,)] = [["tt.divisibility", 16]]
    compiled = compile_source(
        ASTSource(kernel, signature, constants, hints),
        target=GPUTarget("cuda", architecture, 32),
        options={"num_warps": launch.warps, "num_stages": launch.stages, "enable_fp_fusion": launch.fuses},
    )
    return disassemble(compiled.asm["cubin"], architecture, compiled.metadata.shared)


def disassemble(binary: bytes, architecture: int, shared_bytes: int) -> Program:
    """What the tools that come with Triton say of a compiled kernel."""
    import tempfile

    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        usage, assembly = (
            subprocess.run([tools / "cuobjdump", flag, file.name], capture_output=True, text=True, check=True).stdout
            for flag in ("-res-usage", "-sass")
        )
    amounts = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    return Program(architecture, amounts["REG"], amounts["STACK"], amounts["LOCAL"], shared_bytes, assembly)


def answer() -> None:
    """Compile what the standard input asks for and print the programs."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        print(f"Triton compiles nothing here: {error}", file=sys.stderr)
        raise SystemExit(MISSING) from None
    request = json.load(sys.stdin)
    architectures = request["architectures"]
    tasks = [(Launch(**launch), architecture) for launch in request["launches"] for architecture in architectures]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        compiled = [asdict(program) for program in pool.map(compile_launch, *zip(*tasks, strict=True))]
    programs = [
        dict(zip(architectures, compiled[first : first + len(architectures)], strict=True))
        for first in range(0, len(compiled), len(architectures))
    ]
    json.dump(programs, sys.stdout)


if __name__ == "__main__":
    answer()
