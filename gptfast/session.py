"""A model ready to run: `load` reads a checkpoint and chooses the device and dtype that it runs in."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F

from gptfast.cache import get_cache_dir, is_writable, read_cached, replace_atomically
from gptfast.chat import ChatTemplate
from gptfast.checkpoint.base import Checkpoint
from gptfast.config import GenerationDefaults, SamplingConfig
from gptfast.cpu import describe_cpu
from gptfast.errors import UserError
from gptfast.fused import FusedTransformer, explain_unfusable, has_pdl
from gptfast.graphs import get_cuda_graphs
from gptfast.kernels import ops
from gptfast.kernels.cuda.configurations import find_step
from gptfast.kernels.ops import KernelChoice
from gptfast.loading import WEIGHTS, Weights, check_memory, load_model
from gptfast.model import Transformer, describe_dtype
from gptfast.runner import CompileKind, Runner
from gptfast.speculation.selection import check_draft, open_speculator
from gptfast.speculation.speculator import Speculator
from gptfast.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}
KV_DTYPES = {name: dtype for name, dtype in DTYPES.items() if dtype != torch.float16} | {"int8": torch.int8}
ACTIVATIONS = ("fp32", "int8")
CUDA_GRAPHS = ("manual", "trees", "off")
STEPS = ("auto", "compiled", "fused")
StepName = Literal["eager", "compiled", "fused"]


@dataclass
class Session:
    """A model ready to run, and what its key/value cache holds; made by `load`.

    Attributes:
        checkpoint: where the model came from.
        runner: executes the model's steps.
        tokenizer: None for random weights.
        load_s: seconds from the checkpoint on disk to the model in memory, the choice of a dtype included.
        cached_ids: the tokens whose keys and values the cache holds.
        owner: the stream that they belong to; it cannot go on once another one has begun.
        speculator: proposes tokens for the model to verify; None for plain decoding.
    """

    checkpoint: Checkpoint
    runner: Runner
    tokenizer: Tokenizer | None
    load_s: float
    cached_ids: list[int] = field(default_factory=list)
    owner: object = None
    speculator: Speculator | None = None

    @property
    def defaults(self) -> GenerationDefaults:
        """What the checkpoint says about starting, ending and sampling text."""
        return self.checkpoint.generation

    @property
    def eos_ids(self) -> frozenset[int]:
        """Every token that ends a text: those of the model's config and that of its tokenizer."""
        eos_id = None if self.tokenizer is None else self.tokenizer.eos_id
        return frozenset(self.defaults.eos_ids) | (frozenset() if eos_id is None else {eos_id})

    @property
    def dtype(self) -> str:
        """What activations are computed in: `float32`, `bfloat16` or `float16`."""
        return describe_dtype(self.runner.model.dtype)

    @property
    def kv_dtype(self) -> str:
        """What keys and values are held in: a dtype, or `int8`."""
        return describe_dtype(self.runner.kv_dtype)

    @property
    def weights(self) -> str:
        """What matrices are held in, the most bytes first: `Q4_1 + Q8_0`, `bfloat16`."""
        return " + ".join(self.runner.model.list_weight_precisions())

    @property
    def kernels(self) -> str:
        """What multiplies: `cpp`, `triton`, `inductor` or `torchao`, or `torch` for its own operators."""
        return self.runner.model.kernels or "torch"

    @property
    def step(self) -> StepName:
        """What decodes: the `compiled` model, the same `eager`, or the `fused` pass."""
        if self.runner.fused is not None:
            return "fused"
        return "compiled" if self.runner.is_compiled else "eager"

    @property
    def activations(self) -> str:
        """What activations are rounded to before they are multiplied with a quantized matrix: `int8`, else `fp32`."""
        return "int8" if self.runner.model.rounds_inputs else "fp32"

    @property
    def weight_bytes_per_token(self) -> int:
        """Bytes of weights that a decode step reads."""
        return self.runner.model.count_weight_bytes_per_token()

    def warm_up(self, prompt_tokens: int | None = None, sampling: SamplingConfig | None = None) -> None:
        """Compile the steps that generating from a prompt of that length needs, or from any prompt if None.

        `sampling` is how tokens will be chosen; None for what the checkpoint asks for.
        """
        sampling = self.defaults.sampling if sampling is None else sampling
        self.runner.warm_up(prompt_tokens, sampling=sampling, verifies=self.speculator is not None)
        if self.speculator is not None:
            self.speculator.warm_up(prompt_tokens, sampling)

    def reserve(self, length: int) -> None:
        """Make room for a text of `length` tokens; raises PromptError beyond the context, or the memory."""
        self.runner.reserve(length)
        for runner in self.list_runners()[1:]:
            runner.reserve(min(length, runner.context))

    def list_runners(self) -> list[Runner]:
        """The model's, and those of draft models."""
        return [self.runner, *([] if self.speculator is None else self.speculator.list_runners())]

    @property
    def compile_s(self) -> float:
        """Seconds that compiling steps, or loading compiled ones, took."""
        return sum(runner.compile_statistics.seconds for runner in self.list_runners())

    @property
    def compile_kind(self) -> CompileKind:
        """That of the model's steps, or `cold` if it was a draft model whose steps had to be compiled."""
        kinds = [runner.compile_kind for runner in self.list_runners()]
        return "cold" if "cold" in kinds else kinds[0]

    @functools.cached_property
    def chat_template(self) -> ChatTemplate | None:
        """None for a base model; read when first asked for, as a raw prompt needs none."""
        return self.checkpoint.read_chat_template()


def load(
    path: str | Path | None = None,
    *,
    preset: str | None = None,
    device: str = "auto",
    dtype: str | None = None,
    weights: Weights = "stored",
    activations: str | None = None,
    kv_dtype: str | None = None,
    kernels: KernelChoice = "auto",
    compile: bool = False,
    batch_size: int = 1,
    threads: int | None = None,
    cuda_graphs: str | None = None,
    step: str = "auto",
    pdl: bool = True,
    draft: str | Path | None = None,
    speculate_k: int | None = None,
) -> Session:
    """Load a model and make it ready to run.

    Args:
        path: a checkpoint directory or GGUF file; None for the default model, fetched if need be.
        preset: instead of `path`, an architecture to fill with random weights.
        device: `cpu`, `cuda` or `auto` (CUDA where there is one).
        dtype: what activations are computed in, one of `DTYPES`; None for bfloat16 on CUDA and float32 on a CPU.
        weights: what to decode from, one of `WEIGHTS`: what the checkpoint holds, or that expanded or rounded.
        activations: `int8` rounds them before they are multiplied with quantized weights, `fp32` does not; None for
            int8 where there are such weights.
        kv_dtype: what keys and values are held in, one of `KV_DTYPES`; None for `dtype` where that is given, or
            where there are no CPU kernels, and else bfloat16.
        kernels: what multiplies, one of `KERNEL_CHOICES`. `auto` is ours: in C++ on a CPU, `triton` on CUDA from sm_80
            on, torch's own operators where there are none. To compare with on CUDA, where a decode step's attention
            stays ours: `inductor` is what torch.compile makes of products with floats, and of int8 with one row;
            `torchao` its int4 kernel, with other matrices as by `triton`. A draft model runs on those of `auto`.
        compile: run compiled steps; the first start on a machine compiles them, later ones load them.
        batch_size: texts that are decoded at once.
        threads: for the CPU, of the whole process; None leaves torch's own choice.
        cuda_graphs: of the steps that decode: `manual` records each with its sampling as one graph of our own, `trees`
            leaves that to torch.compile's max-autotune, `off` has the host launch every kernel. None for `manual` on
            CUDA, if steps are compiled and there are kernels for it.
        step: of decoding on CUDA, in graphs of ours: `compiled` is the model as torch.compile makes it, `fused` five
            kernels of ours a layer. `auto` is what an acceptance run found right and faster on this GPU, else compiled.
        pdl: have the fused step's kernels load weights while the ones before them end, from sm_90 on.
        draft: speculate, which changes the speed and not the text: `ngram`, a checkpoint's path, `int4`, `int8`,
            `layers:N`, or `ngram,` before one of the others; see `gptfast.speculation.selection.open_speculator`.
        speculate_k: tokens to propose in every round; None for as many as pay.

    Raises:
        UserError: a setting that cannot be honoured, or a checkpoint that cannot be read.
    """
    if batch_size < 1:
        raise UserError(f"batch size is {batch_size}; it must be at least 1")
    check_draft(draft, speculate_k, batch_size)
    if threads is not None:
        set_threads(threads)
    check_choice("weights", weights, WEIGHTS)
    check_choice("kernels", kernels, ops.KERNEL_CHOICES)
    check_choice("step", step, STEPS)
    if activations is not None:
        check_choice("activations", activations, ACTIVATIONS)
    start = time.perf_counter()
    chosen_device = choose_device(device)
    chosen_dtype = choose_dtype(dtype, chosen_device)
    check_cuda_graphs(cuda_graphs, chosen_device, compile)
    check_step(step, chosen_device, cuda_graphs, compile)
    chosen_kernels = ops.choose_kernels(chosen_device, kernels)
    check_kernels(kernels, chosen_dtype, compile)
    chosen_kv_dtype = choose_kv_dtype(kv_dtype, chosen_dtype, chosen_device, is_dtype_given=dtype is not None)
    checkpoint = open_source(path, preset)
    check_memory(checkpoint, weights, chosen_dtype, chosen_device, chosen_kernels)
    model = load_model(
        checkpoint,
        device=chosen_device,
        dtype=chosen_dtype,
        weights=weights,
        rounds_inputs=activations != "fp32",
        exact_rows=draft is not None,
        kernels=chosen_kernels,
    )
    if activations == "int8" and not model.rounds_inputs:
        logger.warning("activations are rounded for the CPU's quantized weights only, of which there are none here")
    records = records_graphs(cuda_graphs, model, compile or step == "fused")
    runner = Runner(
        model,
        batch_size=batch_size,
        compile=compile,
        kv_dtype=chosen_kv_dtype,
        graphs=get_cuda_graphs(chosen_device) if records else None,
        fused=fuse(step, model, chosen_kv_dtype, batch_size, pdl=pdl) if records or step == "fused" else None,
        uses_graph_trees=compile and cuda_graphs == "trees",
    )
    tokenizer = checkpoint.load_tokenizer()
    if draft is None:
        speculator = None
    else:
        speculator = open_speculator(os.fspath(draft), runner, checkpoint, tokenizer, k=speculate_k)
    return Session(
        checkpoint=checkpoint,
        runner=runner,
        tokenizer=tokenizer,
        load_s=time.perf_counter() - start,
        speculator=speculator,
    )


def check_choice(setting: str, value: str, choices: Iterable[str]) -> None:
    """Raise UserError for a value that a setting does not have."""
    if value not in choices:
        raise UserError(f"{setting} {value!r} is not supported; use {', '.join(choices)}")


def set_threads(threads: int) -> None:
    """Have the process compute with so many CPU threads; raises UserError for more than make sense here."""
    most = 4 * (os.cpu_count() or 1)
    if not 1 <= threads <= most:
        raise UserError(f"{threads} threads are not supported on this machine; give 1 to {most}")
    torch.set_num_threads(threads)


def choose_device(name: str) -> torch.device:
    """The device of that name; raises UserError if this machine lacks it."""
    if name not in ("auto", "cpu", "cuda"):
        raise UserError(f"device {name!r} is not supported; use cpu, cuda or auto")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "device cuda is asked for but torch finds no CUDA GPU; use --device cpu or a CUDA build of torch"
        )
    return torch.device(name)


def choose_dtype(name: str | None, device: torch.device) -> torch.dtype:
    """The dtype of that name, or the device's best; raises UserError if the device cannot compute in it.

    The CPU kernels compute in float32 whatever the weights are held in. Without them weights are expanded to the dtype,
    so there it is what the library multiplies faster.
    """
    if name is None:
        if device.type == "cpu":
            return torch.float32 if ops.has_cpu_kernels() else measure_cpu_dtype()
        return torch.bfloat16 if supports_bfloat16(device) else torch.float16
    check_choice("dtype", name, DTYPES)
    dtype = DTYPES[name]
    if device.type == "cpu" and dtype == torch.float16:
        raise UserError("dtype float16 is not supported on cpu, which has no fast arithmetic for it; use bfloat16")
    if device.type == "cuda" and dtype == torch.bfloat16 and not supports_bfloat16(device):
        raise UserError("dtype bfloat16 is not supported on a GPU older than sm_80; use float16")
    return dtype


def choose_kv_dtype(name: str | None, dtype: torch.dtype, device: torch.device, *, is_dtype_given: bool) -> torch.dtype:
    """The dtype of the key/value cache; see `load`."""
    if name is not None:
        check_choice("kv-dtype", name, KV_DTYPES)
        return KV_DTYPES[name]
    # torch's own attention reads a cache in the activations' dtype only; another one would be converted in every step.
    has_kernel = device.type == "cpu" and ops.has_cpu_kernels()
    return torch.bfloat16 if has_kernel and not is_dtype_given else dtype


def check_cuda_graphs(name: str | None, device: torch.device, compile: bool) -> None:
    """Raise UserError for CUDA graphs of a kind that there is not, or that the other settings leave no room for."""
    if name is None:
        return
    check_choice("cuda-graphs", name, CUDA_GRAPHS)
    if device.type != "cuda":
        raise UserError(f"cuda-graphs {name} is asked for and the device is {device.type}; leave it out, or use cuda")
    if name == "trees" and not compile:
        raise UserError("cuda-graphs trees is a mode of torch.compile; compile the steps, or use manual")


def check_step(name: str, device: torch.device, cuda_graphs: str | None, compile: bool) -> None:
    """Raise UserError for a fused step where it could not be recorded, and a compiled one that is not compiled."""
    if name == "compiled" and not compile:
        raise UserError("step compiled is asked for and steps are not compiled; compile them too")
    if name != "fused":
        return
    if device.type != "cuda":
        raise UserError(f"step fused is asked for and the device is {device.type}; leave it out, or use cuda")
    if cuda_graphs not in (None, "manual"):
        raise UserError(f"step fused is recorded as one graph of ours and cuda-graphs is {cuda_graphs}; use manual")


def fuse(
    step: str, model: Transformer, kv_dtype: torch.dtype, batch_size: int, *, pdl: bool
) -> FusedTransformer | None:
    """The model's fused pass, if `step` asks for one; raises UserError if it does and there is none."""
    reason = explain_unfusable(model, kv_dtype, batch_size)
    if step == "fused" and reason is not None:
        raise UserError(f"there is no fused step, as {reason}; use --step compiled")
    if reason is not None or step == "compiled" or (step == "auto" and find_step(model.device) != "fused"):
        return None
    return FusedTransformer(model, pdl=pdl and has_pdl(model.device))


def check_kernels(name: KernelChoice, dtype: torch.dtype, compile: bool) -> None:
    """Raise UserError for kernels that the other settings leave no room for."""
    if name == "inductor" and not compile:
        raise UserError("kernels inductor are what torch.compile makes; compile the steps, or use triton")
    if name == "torchao" and dtype != torch.bfloat16:
        raise UserError(
            f"kernels torchao multiply in bfloat16 alone and dtype is {describe_dtype(dtype)}; use bfloat16, or triton"
        )


def records_graphs(name: str | None, model: Transformer, compile: bool) -> bool:
    """Whether the runner records its steps; a line in the log says if it cannot, though it was asked to."""
    if model.device.type != "cuda" or name not in (None, "manual") or (name is None and not compile):
        return False
    if model.kernels is None:
        logger.warning("without the Triton kernels steps are not recorded as CUDA graphs; use --cuda-graphs trees")
    return model.kernels is not None


def supports_bfloat16(device: torch.device) -> bool:
    """Whether a CUDA GPU computes in bfloat16: from sm_80 on."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def measure_cpu_dtype() -> torch.dtype:
    """Bfloat16 or float32, whichever the library multiplies a matrix with a vector in sooner here; measured once.

    Half the bytes are no gain where it has to widen every weight by hand.
    """
    facts = (describe_cpu(), torch.__version__, str(torch.get_num_threads()))
    path = get_cache_dir() / "cpu-dtype" / f"{hashlib.sha256('|'.join(facts).encode()).hexdigest()[:24]}.json"
    names = ("float32", "bfloat16")
    seconds = read_times(path, names)
    if seconds is None:
        logger.info("measuring which dtype this CPU decodes faster in, this once")
        seconds = time_matrix_vector(names)
        if is_writable(path.parent):
            with replace_atomically(path) as partial:
                partial.write_text(json.dumps(seconds))
    return DTYPES[min(seconds, key=lambda name: seconds[name])]


def read_times(path: Path, names: tuple[str, ...]) -> dict[str, float] | None:
    """The seconds by dtype that an earlier start measured; None if there are none, or the file is damaged."""
    try:
        kept = json.loads(read_cached(path) or b"")
        seconds = {name: float(kept[name]) for name in names}
    except (ValueError, TypeError, KeyError):
        return None
    return seconds if all(0 < value < math.inf for value in seconds.values()) else None


@torch.no_grad()
def time_matrix_vector(names: tuple[str, ...]) -> dict[str, float]:
    """The least of ten times, in seconds, of a product that no cache can hold; the dtypes take turns."""
    operands = {
        name: (torch.ones(1, 4096, dtype=DTYPES[name]), torch.ones(8192, 4096, dtype=DTYPES[name])) for name in names
    }
    seconds = dict.fromkeys(names, math.inf)
    for repeat in range(11):
        for name, (x, weight) in operands.items():
            start = time.perf_counter()
            F.linear(x, weight)
            if repeat:  # the first call sets up its threads
                seconds[name] = min(seconds[name], time.perf_counter() - start)
    return seconds


def open_source(path: str | Path | None, preset: str | None) -> Checkpoint:
    """What `load` loads: a checkpoint, random weights or the default model. Raises UserError for two of them."""
    if preset is not None:
        if path is not None:
            raise UserError(f"both the checkpoint {path} and random weights for {preset} are asked for; give one")
        from gptfast.checkpoint.random import RandomCheckpoint

        return RandomCheckpoint(preset)
    from gptfast.checkpoint import open_checkpoint

    if path is None:
        from gptfast.download import get_default_model

        path = get_default_model()
    return open_checkpoint(Path(os.path.expanduser(path)))
