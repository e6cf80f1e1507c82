"""What torch.compile generates for a GPU of compute capability 9.0, on a machine and a torch that have none.

Tensors are fake, so weights of any size take no memory, and Inductor is stopped when it has written its code: nothing
is loaded or run. What only a GPU can tell is given: products that Inductor does not generate itself are the library's,
as templates would have to be timed, and torch's own attention is the memory-efficient kernel, as with every mask.

All this stands on private names of torch, hence for one version of it, and replaces functions of torch.cuda for the
whole process. So it has one of its own: `generate_code` starts `python -m tests.reference.pretended_cuda`.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from tests.reference.sessions import run_process

TORCH_VERSION = "2.13"
CAPABILITY = (9, 0)
PROPERTIES = SimpleNamespace(
    name="H100",
    major=CAPABILITY[0],
    minor=CAPABILITY[1],
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block=48 * 2**10,
    shared_memory_per_block_optin=227 * 2**10,
    L2_cache_size=50 * 2**20,
    total_memory=80 * 10**9,
    warp_size=32,
)
DEVICE = """
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>)

static int64_t choose_efficient_attention(
    const at::Tensor&, const at::Tensor&, const at::Tensor&,
    const std::optional<at::Tensor>&, double, bool, std::optional<double>, bool) {
  return 2;  // SDPBackend::efficient_attention
}

static const bool is_chosen =
    (at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(choose_efficient_attention), true);
"""
SETTINGS = {
    # With one candidate there is nothing to time; padding would be timed too.
    "max_autotune_gemm_backends": "ATEN",
    "shape_padding": False,
    # Constants would be computed on the device.
    "joint_graph_constant_folding": False,
    # The code is wanted, whether it has been written before or not.
    "fx_graph_cache": False,
    "compile_threads": 1,
    # Otherwise the vector instructions of the host would be tried, with its compiler, before code for it is written.
    "cpp.vec_isa_ok": True,
    # A kernel compiled for this launcher does not let its machine code be seen.
    "use_static_cuda_launcher": False,
}
HOUSEKEEPING = {
    "args.clear",
    "assert_alignment",
    "assert_size_stride",
    "copy_if_misaligned",
    "empty_strided_cuda",
    "get_raw_stream",
    "reinterpret_tensor",
    "torch.cuda._DeviceGuard",
    "torch.cuda.set_device",
}
"""What a wrapper calls beside what it is for."""


@dataclass(frozen=True)
class Buffer:
    """Memory that generated code takes: so many elements of a dtype; a dynamic length counts as when it was traced."""

    name: str
    elements: int
    dtype: str
    device: str


@dataclass(frozen=True)
class GeneratedCode:
    """The code of one graph.

    Attributes:
        wrapper: Python source that takes memory and launches.
        kernels: Triton sources by name.
        calls: what each function of the wrapper calls, in order; it begins with `call`.
        buffers: what the graph and the graphs inside it take.
        inputs: devices of inputs and constants by name.
        compiled: by kernel, how many configurations of it were compiled to machine code.
        broken: by kernel, why one cannot be.
    """

    wrapper: str
    kernels: dict[str, str]
    calls: dict[str, list[str]]
    buffers: list[Buffer]
    inputs: dict[str, str]
    compiled: dict[str, int] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)

    def list_launches(self, function: str = "call") -> list[str]:
        """Triton kernels by name and everything else that runs when a function of the wrapper does, in order."""
        launches: list[str] = []
        for called in self.calls[function]:
            if called in self.calls:
                launches += self.list_launches(called)
            elif called not in HOUSEKEEPING:
                launches.append(called.removesuffix(".run"))
        return launches


class CodeGenerated(BaseException):
    """Ends a compilation that has got as far as its code. It is no error, so what handles errors lets it through."""

    def __init__(self, code: GeneratedCode) -> None:
        super().__init__()
        self.code = code


def explain_absence() -> str | None:
    """Why no code can be generated here; None if it can."""
    if torch.__version__.split("+")[0].rpartition(".")[0] != TORCH_VERSION:
        return f"private names of torch {TORCH_VERSION} are used, and this is {torch.__version__}"
    if torch.version.cuda is not None or torch.version.hip is not None:
        return "this torch is built for GPUs"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return None


def generate_code(module: str, names: Iterable[str], *, compiles_all: bool = False) -> dict[str, GeneratedCode | str]:
    """By name in the `CASES` of a module, the code that each compiles first, or the error that it ends with.

    A case is called without arguments, on the pretended device. Every Triton kernel is compiled to machine code, in
    the first configuration that Inductor would time or in all of them.
    """
    flags = ["--all-configurations"] if compiles_all else []
    outcome = run_process("-m", __name__, *flags, module, *names, TRITON_INTERPRET="0")
    assert outcome.exit_code == 0, outcome.stderr
    return dict(zip(names, map(read_result, outcome.stdout.splitlines()), strict=True))


def read_result(line: str) -> GeneratedCode | str:
    """Undo what `main` does to a result."""
    result: str | dict[str, Any] = json.loads(line)
    if isinstance(result, str):
        return result
    return GeneratedCode(**result | {"buffers": [Buffer(**buffer) for buffer in result["buffers"]]})


@contextlib.contextmanager
def pretended_device() -> Iterator[None]:
    """Within, `cuda` is a device, tensors are fake, and torch.compile raises CodeGenerated. There is no way back."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.fx_passes import joint_graph
    from torch._inductor.graph import GraphLowering
    from torch._inductor.runtime import triton_helpers
    from torch._subclasses import FakeTensorMode

    register_device()
    activate_driver()
    init_patterns = joint_graph.lazy_init
    with contextlib.ExitStack() as stack:
        for name, replacement in list_replacements().items():
            stack.enter_context(patch.object(torch.cuda, name, replacement))
            if hasattr(CudaInterface, name.removeprefix("_")):
                stack.enter_context(patch.object(CudaInterface, name.removeprefix("_"), staticmethod(replacement)))
        for owner, name, replacement in (
            (torch.version, "cuda", "12.8"),
            # Patterns are traced on the device, backwards too, which fails there; they are the same for all.
            (joint_graph, "lazy_init", lambda device=None: init_patterns(torch.device("cpu"))),
            (GraphLowering, "compile_to_module", stop_after_code),
            (triton_helpers, "set_driver_to_gpu", lambda: None),
        ):
            stack.enter_context(patch.object(owner, name, replacement))
        stack.enter_context(torch._inductor.config.patch(SETTINGS))
        stack.enter_context(torch.no_grad())
        stack.enter_context(FakeTensorMode())
        yield


def register_device() -> None:
    """Have C++ take `cuda` for a device, which it is not in a build without it."""
    import ninja
    from torch.utils.cpp_extension import load_inline

    path = os.pathsep.join([ninja.BIN_DIR, os.environ.get("PATH", os.defpath)])
    with tempfile.TemporaryDirectory() as directory, patch.dict(os.environ, PATH=path):
        load_inline(
            "pretended_cuda",
            DEVICE,
            is_python_module=False,
            no_implicit_headers=True,
            extra_cflags=["-O0"],
            build_directory=directory,
        )


def activate_driver() -> None:
    """Have Triton, which asks its driver what to compile for, find the pretended device."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    target = GPUTarget("cuda", CAPABILITY[0] * 10 + CAPABILITY[1], PROPERTIES.warp_size)
    driver.set_active(SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0))


def list_replacements() -> dict[str, Callable[..., Any]]:
    """Functions of torch.cuda, and what they do on a machine with one GPU."""
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
        "get_device_properties": lambda device=None: PROPERTIES,
        "get_device_capability": lambda device=None: CAPABILITY,
        "is_bf16_supported": lambda including_emulation=True: True,
        "mem_get_info": lambda device=None: (PROPERTIES.total_memory, PROPERTIES.total_memory),
        "current_stream": lambda device=None: None,
        "synchronize": lambda device=None: None,
        "get_rng_state": lambda device=None: torch.empty(0, dtype=torch.uint8),
        "set_rng_state": lambda state, device=None: None,
    }


def stop_after_code(graph: Any) -> Any:
    """In the place of `GraphLowering.compile_to_module`: raise CodeGenerated."""
    wrapper = graph.codegen()[0].value
    tree = ast.parse(wrapper)
    buffers = list_buffers(graph)
    unknown = list_allocated(tree) - {buffer.name for buffer in buffers}
    assert not unknown, f"of what size are {unknown}?"
    raise CodeGenerated(GeneratedCode(wrapper, read_kernels(tree), read_calls(tree), buffers, list_inputs(graph)))


def list_allocated(wrapper: ast.Module) -> set[str]:
    """The variables of a wrapper that hold memory which it takes itself."""
    assignments = [node for node in ast.walk(wrapper) if isinstance(node, ast.Assign)]
    return {
        ast.unparse(assignment.targets[0])
        for assignment in assignments
        if isinstance(assignment.value, ast.Call) and ast.unparse(assignment.value.func).startswith("empty_strided")
    }


def read_kernels(wrapper: ast.Module) -> dict[str, str]:
    """The Triton kernels that a wrapper defines, by name."""
    calls = [node for node in ast.walk(wrapper) if isinstance(node, ast.Call)]
    definitions = [call.args[:2] for call in calls if ast.unparse(call.func) == "async_compile.triton"]
    return {ast.literal_eval(name): ast.literal_eval(source) for name, source in definitions}


def read_calls(wrapper: ast.Module) -> dict[str, list[str]]:
    """What each function in a wrapper calls, in order; parts that the graph was split into are called by name."""
    calls: dict[str, list[str]] = {}
    for function in ast.walk(wrapper):
        if isinstance(function, ast.FunctionDef):
            nodes = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
            nodes.sort(key=lambda node: (node.end_lineno, node.end_col_offset))
            names = [ast.unparse(node.func) for node in nodes]
            calls[function.name] = [re.sub(r"^self\.partitions\[(\d+)\]$", r"partition_\1", name) for name in names]
    return calls


def list_buffers(graph: Any) -> list[Buffer]:
    """What a graph takes, and the graphs inside it; its inputs in another form, or written to, are not among that."""
    from torch._inductor import ir

    found = [
        Buffer(
            name=buffer.get_name(),
            elements=int(graph.sizevars.optimization_hint(buffer.get_numel())),
            dtype=str(buffer.get_dtype()).removeprefix("torch."),
            device=str(buffer.get_device()),
        )
        for buffer in graph.buffers
        if buffer.get_name() not in graph.removed_buffers
        and buffer.has_tensor_output()
        and not isinstance(buffer.layout, ir.MutationLayoutSHOULDREMOVE)
        and not buffer.get_inputs_that_alias_output()
    ]
    inner = {
        subgraph.name: subgraph.graph
        for operation in graph.operations
        if isinstance(operation, ir.ExternKernel)
        for subgraph in operation.get_subgraphs()
    }
    return found + [buffer for subgraph in inner.values() for buffer in list_buffers(subgraph)]


def list_inputs(graph: Any) -> dict[str, str]:
    """Devices of a graph's inputs and constants by name; numbers have none."""
    tensors = {name: value for name, value in graph.graph_inputs.items() if hasattr(value, "get_device")}
    devices = {name: str(value.get_device()) for name, value in tensors.items()}
    return devices | {name: str(value.device) for name, value in graph.constants.items()}


def compile_kernel(name: str, source: str, *, compiles_all: bool) -> int:
    """Compile a kernel as Inductor does, in its first configuration or in all; how many these are."""
    from torch._inductor.codecache import PyCodeCache

    autotuner = getattr(PyCodeCache.load(source), name)
    configurations = autotuner.configs[: None if compiles_all else 1]
    for configuration in configurations:
        compiled = autotuner._precompile_config(configuration).kernel
        assert compiled.metadata.target.arch == CAPABILITY[0] * 10 + CAPABILITY[1]
        assert compiled.asm["cubin"]
    return len(configurations)


def run_case(case: Callable[[], object], *, compiles_all: bool) -> GeneratedCode | str:
    """The code of the first graph that a case compiles, and its kernels compiled; or the error that it ends with."""
    torch._dynamo.reset()
    try:
        case()
    except CodeGenerated as generated:
        code = generated.code
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    else:
        return "nothing was compiled"
    for name, source in code.kernels.items():
        try:
            code.compiled[name] = compile_kernel(name, source, compiles_all=compiles_all)
        except Exception as error:
            code.broken[name] = f"{type(error).__name__}: {error}"
    return code


def main(arguments: Sequence[str]) -> None:
    """Print a line of JSON for every case of a module that is named."""
    compiles_all = arguments[0] == "--all-configurations"
    module, *names = arguments[1:] if compiles_all else arguments
    cases = importlib.import_module(module).CASES
    with tempfile.TemporaryDirectory() as directory:
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": f"{directory}/inductor", "TRITON_CACHE_DIR": f"{directory}/triton"}
        with pretended_device():
            for name in names:
                result = run_case(cases[name], compiles_all=compiles_all)
                print(json.dumps(result if isinstance(result, str) else asdict(result)))


if __name__ == "__main__":
    from tests.reference import pretended_cuda  # the module that cases import, where this one is another

    pretended_cuda.main(sys.argv[1:])
