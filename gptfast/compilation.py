"""Compile a decoding step once per machine, and load it in later processes without tracing it again.

On a CPU a step is compiled ahead of time (`aot_compile`) and kept in the cache under a key of everything that its
code depends on. It has no tracer behind it, so it cannot recompile. On CUDA it is compiled when first called, as
max-autotune then runs it as a CUDA graph, which cannot be kept on disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import io
import logging
import os
import sys
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import gptfast.decode
import gptfast.kernels.ops
import gptfast.linear
import gptfast.model
from gptfast.cache import get_cache_dir, get_temporary_dir, is_writable, read_cached, replace_atomically
from gptfast.cpu import describe_cpu
from gptfast.model import Transformer

logger = logging.getLogger(__name__)

Step = Callable[..., Tensor]

INDUCTOR_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
LENGTH_AXIS = -2
"""Of every buffer of the model: the caches are (B, K, L, D), the rotary tables (L, D/2)."""
MIN_ELEMENTS_PER_THREAD = 16_384
"""Below this a loop runs on one thread: on 2 cores of a Zen 3 starting a team for the small loops of a 135M model
took 1.9 of its 16 ms a token."""


class CompilationError(RuntimeError):
    """A step that this machine cannot compile; it can still run eagerly."""


@dataclass
class CompileStatistics:
    """What compiling took: seconds in all, how many steps were compiled and how many came from the cache."""

    seconds: float = 0.0
    compiled: int = 0
    loaded: int = 0


@dataclass(frozen=True)
class CompiledStep:
    """A step ready to call, what it took to get it, and whether it came from the cache."""

    call: Step
    seconds: float
    is_cached: bool


def compile_step(
    function: Step,
    model: Transformer,
    inputs: dict[str, Tensor],
    *,
    separate_kernels: bool = False,
    sizes: range | None = None,
    uses_graph_trees: bool = False,
) -> CompiledStep:
    """Compile a step of `decode` for this model and inputs of these dtypes, shapes and strides.

    The step may be called with caches of any length, with any number of `kv_pos` from 2 on and, on a CPU, with any
    number of tokens in `sizes`, if that is given; with nothing else that differs. `inputs` are its arguments after the
    model, in order. Raises CompilationError if there is no C++ compiler or it fails.

    `separate_kernels` makes a slower step whose kernels can be timed one by one: on a CPU every loop is a function
    of its own, where else all loops between two products of the library are one. `uses_graph_trees` has torch record
    and replay CUDA graphs, on CUDA.
    """
    start = time.perf_counter()
    use_persistent_kernel_cache()
    with compiler_failures_named():
        if inputs["tokens"].device.type == "cuda":
            step, is_cached = compile_for_cuda(function, model, inputs, uses_graph_trees), False
        else:
            step, is_cached = compile_ahead_of_time(function, model, inputs, separate_kernels, sizes)
    return CompiledStep(step, time.perf_counter() - start, is_cached)


@contextlib.contextmanager
def compiler_failures_named() -> Iterator[None]:
    """Turn whatever says that this machine cannot compile into a CompilationError of one line."""
    from torch._dynamo.exc import BackendCompilerFailed
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

    try:
        yield
    except (BackendCompilerFailed, CppCompileError, InvalidCxxCompiler) as error:
        if isinstance(error, InvalidCxxCompiler) or InvalidCxxCompiler.__name__ in str(error):
            raise CompilationError("there is no working C++ compiler; install g++, or name one with CXX") from error
        raise CompilationError(str(error).strip().splitlines()[0]) from error


def compile_for_cuda(function: Step, model: Transformer, inputs: dict[str, Tensor], uses_graph_trees: bool) -> Step:
    """Compile for CUDA by running the step once on `inputs`; with graphs, every length of `kv_pos` gets its own."""
    mode = "max-autotune" if uses_graph_trees else "max-autotune-no-cudagraphs"
    compiled: Any = torch.compile(copy_code(function), fullgraph=True, mode=mode)

    def step(model: Transformer, tokens: Tensor, input_pos: Tensor, kv_pos: Tensor, *rest: Tensor) -> Tensor:
        torch._dynamo.mark_dynamic(kv_pos, 0)
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        # The graph writes its next output to the same memory.
        output: Tensor = compiled(model, tokens, input_pos, kv_pos, *rest).clone()
        return output

    step(model, *inputs.values())
    return step


def compile_for_recording(function: Callable[..., None]) -> Callable[..., None]:
    """Compile a step that is recorded by us as a CUDA graph, when it is first called; nothing of it is dynamic."""
    import torch._inductor

    use_persistent_kernel_cache()
    options = torch._inductor.list_mode_options("max-autotune-no-cudagraphs")
    # Else the writes of keys and values are two kernels, as all that they both read is a position of 8 bytes.
    options["score_fusion_memory_threshold"] = 1
    compiled: Any = torch.compile(copy_code(function), fullgraph=True, dynamic=False, options=options)

    def step(*inputs: Any) -> None:
        with compiler_failures_named():
            compiled(*inputs)

    return step


def copy_code(function: Any) -> Any:
    """The same function as another one to torch.compile, which compiles each a few times only, and then none anew."""
    return types.FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__
    )


def compile_ahead_of_time(
    function: Step, model: Transformer, inputs: dict[str, Tensor], separate_kernels: bool, sizes: range | None
) -> tuple[Step, bool]:
    """The step, and whether an earlier process had compiled it."""
    path = get_cache_dir() / "steps" / f"{compute_key(function, model, inputs, separate_kernels, sizes)}.bin"
    step = load_step(path, model, inputs)
    is_cached = step is not None and not uses_temporary_kernel_cache()
    if step is None:
        keeps = is_writable(path.parent)
        outlook = "later starts load it" if keeps else f"{path.parent} cannot be written, so the next start must too"
        count = inputs["tokens"].shape[1] if sizes is None else f"{sizes[0]} to {sizes[-1]}"
        logger.info("compiling %s for %s tokens; %s", function.__name__, count, outlook)
        step = build_step(function, model, inputs, separate_kernels, sizes)
        if keeps:
            save_step(step, path)
    # The check of its arguments took 0.3 ms of every call, and the runner owns them all.
    step.disable_guard_check()
    return step, is_cached


def build_step(
    function: Step, model: Transformer, inputs: dict[str, Tensor], separate_kernels: bool, sizes: range | None
) -> Any:
    """Trace and compile; see `compile_step`."""
    import torch._dynamo
    import torch._inductor
    from torch._inductor.codegen.cpp import CppScheduling

    inputs = {name: value.clone() for name, value in inputs.items()}  # marks would stay on the runner's own
    torch._dynamo.mark_dynamic(inputs["kv_pos"], 0)
    if sizes is not None:
        torch._dynamo.mark_dynamic(inputs["tokens"], 1, min=sizes[0], max=sizes[-1])
        torch._dynamo.mark_dynamic(inputs["input_pos"], 0, min=sizes[0], max=sizes[-1])
    options = torch._inductor.list_mode_options("max-autotune") | {"cpp.min_chunk_size": MIN_ELEMENTS_PER_THREAD}
    if model.kernels is not None:
        # What is left beside the kernels is small, and a second team of threads would spin on the kernels' cores.
        options["cpp.threads"] = 1
    # The runner owns every buffer, so nothing has to be checked in every layer of every step.
    options |= dict.fromkeys(("size_asserts", "alignment_asserts", "assert_indirect_indexing"), False)
    settings = {
        # Buffers of a module, the caches among them, would else have static shapes whatever is marked ...
        "force_parameter_static_shapes": False,
        # ... and what differs from the model compiled before it in this process would be taken for dynamic.
        "automatic_dynamic_shapes": False,
        # torch 2.11 compiles ahead of time only where that is switched on.
        "enable_aot_compile": True,
    }
    # A kernel is closed as soon as it has more arguments than this.
    most_arguments = 0 if separate_kernels else CppScheduling.MAX_FUSED_KERNEL_ARGS_NUM
    if separate_kernels:
        options["fx_graph_cache"] = False  # its keys know nothing of the line above
    with (
        patch.object(CppScheduling, "MAX_FUSED_KERNEL_ARGS_NUM", most_arguments),
        torch._dynamo.config.patch(settings),
        buffers_of_any_length(model),
    ):
        compiled: Any = torch.compile(function, fullgraph=True, options=options)
        return compiled.aot_compile(((model, *inputs.values()), {}))


@contextlib.contextmanager
def buffers_of_any_length(model: Transformer) -> Iterator[None]:
    """Within, the model's caches and tables are aliases marked as dynamic in their length.

    The marks themselves would be guarded on, so they must not stay on the buffers.
    """
    import torch._dynamo

    owners = [
        (module, name, buffer) for module in model.modules() for name, buffer in module.named_buffers(recurse=False)
    ]
    for module, name, buffer in owners:
        alias = buffer.detach()
        torch._dynamo.mark_dynamic(alias, alias.dim() + LENGTH_AXIS)  # a negative axis would be ignored
        setattr(module, name, alias)
    try:
        yield
    finally:
        for module, name, buffer in owners:
            setattr(module, name, buffer)


def save_step(step: Any, path: Path) -> None:
    """Write a compiled step behind its own hash: it is a pickle, and a damaged one must never be run."""
    with replace_atomically(path) as partial:
        step.save_compiled_function(str(partial))
        payload = partial.read_bytes()
        partial.write_bytes(hashlib.sha256(payload).digest() + payload)


def load_step(path: Path, model: Transformer, inputs: dict[str, Tensor]) -> Any:
    """Load a step that an earlier process compiled; None if it must be made again."""
    import torch._inductor

    content = read_cached(path)
    if content is None:
        return None
    digest, payload = content[: hashlib.sha256().digest_size], content[hashlib.sha256().digest_size :]
    if hashlib.sha256(payload).digest() != digest:
        logger.warning("the compiled step %s is damaged; it is compiled again", path)
        return None
    # The kernels were compiled here before, so the compiler's vector flags need no trial again: 0.7 s.
    with torch._inductor.config.patch({"cpp.vec_isa_ok": True}):
        step: Any = torch.compiler.load_compiled_function(io.BytesIO(payload))
    if not step.guard_check(model, *inputs.values()):
        logger.warning("the compiled step %s does not fit this process; it is compiled again", path)
        return None
    return step


def use_persistent_kernel_cache() -> None:
    """Have Inductor keep its compiled kernels in our cache and not in a directory that a restart may clear.

    A directory that the user chose stays; a cache that cannot be written is replaced by a temporary one.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # Inductor itself sets the variable to its default when it is first imported.
    if os.environ.get(INDUCTOR_CACHE_VARIABLE, default_cache_dir()) != default_cache_dir():
        return
    directory = get_cache_dir() / "inductor"
    if not is_writable(directory):
        directory = get_temporary_dir() / "inductor"
    os.environ[INDUCTOR_CACHE_VARIABLE] = str(directory)


def uses_temporary_kernel_cache() -> bool:
    """Whether kernels are compiled for this process alone."""
    has_temporary_dir = get_temporary_dir.cache_info().currsize > 0  # asking for it would make it
    return has_temporary_dir and Path(os.environ[INDUCTOR_CACHE_VARIABLE]).is_relative_to(get_temporary_dir())


def compute_key(
    function: Step, model: Transformer, inputs: dict[str, Tensor], separate_kernels: bool, sizes: range | None = None
) -> str:
    """A name for all that the compiled code depends on, as 32 hexadecimal digits."""
    tensors = {name: (value.dtype, value.shape) for name, value in inputs.items() if name != "kv_pos"}
    parameters = {name: (value.dtype, value.shape, value.stride()) for name, value in model.named_parameters()}
    parts = [
        function.__name__,
        repr((separate_kernels, sizes)),
        repr(model.config),
        repr(tensors),
        repr(parameters),
        repr([(buffer.dtype, buffer.shape[:LENGTH_AXIS]) for buffer in model.buffers()]),
        repr(model),
        repr(torch.get_num_threads()),
        sys.version,
        torch.__version__,
        describe_cpu(),
        *(inspect.getsource(module) for module in (gptfast.decode, gptfast.kernels.ops, gptfast.linear, gptfast.model)),
        inspect.getsource(sys.modules[__name__]),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def count_traced_graphs() -> int:
    """How many graphs torch.compile has traced in this process; a step loaded from the cache is not traced."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def has_recorded_cuda_graphs() -> bool:
    """Whether CUDA graphs were recorded in this process and none was skipped, by torch.compile's own counters."""
    from torch._dynamo.utils import counters

    seen = counters["inductor"]
    return "cudagraph_recorded_non_static_inputs" in seen and seen["cudagraph_skips"] == 0
