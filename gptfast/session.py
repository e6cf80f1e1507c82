"""A model ready to run: `load` reads a checkpoint and chooses the device and dtype that it runs in."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from gptfast.cache import get_cache_dir, is_writable, read_cached, replace_atomically
from gptfast.chat import ChatTemplate
from gptfast.checkpoint.base import Checkpoint
from gptfast.checkpoint.shapes import list_tensor_shapes
from gptfast.compilation import CompilationError, Step, compile_function, describe_cpu
from gptfast.config import GenerationDefaults
from gptfast.errors import UserError
from gptfast.linear import multiply
from gptfast.loading import load_model
from gptfast.memory import get_available_memory
from gptfast.runner import Runner
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
    """

    checkpoint: Checkpoint
    runner: Runner
    tokenizer: Tokenizer | None
    load_s: float
    cached_ids: list[int] = field(default_factory=list)
    owner: object = None

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
        """What weights, activations and cache are computed in: `float32`, `bfloat16` or `float16`."""
        return str(self.runner.model.tok_embeddings.weight.dtype).removeprefix("torch.")

    @property
    def weight_bytes_per_token(self) -> int:
        """Bytes of weights that a decode step reads."""
        return self.runner.model.count_weight_bytes_per_token()

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
    compile: bool = False,
    batch_size: int = 1,
    threads: int | None = None,
) -> Session:
    """Load a model and make it ready to run.

    Args:
        path: a checkpoint directory or GGUF file; None for the default model, fetched if need be.
        preset: instead of `path`, an architecture to fill with random weights.
        device: `cpu`, `cuda` or `auto` (CUDA where there is one).
        dtype: one of `DTYPES`; None for bfloat16 on CUDA and, on a CPU, what is measured to be faster there.
        compile: run compiled steps; the first start on a machine compiles them, later ones load them.
        batch_size: texts that are decoded at once.
        threads: for the CPU, of the whole process; None leaves torch's own choice.

    Raises:
        UserError: a setting that cannot be honoured, or a checkpoint that cannot be read.
    """
    if batch_size < 1:
        raise UserError(f"batch size is {batch_size}; it must be at least 1")
    if threads is not None:
        set_threads(threads)
    start = time.perf_counter()
    chosen_device = choose_device(device)
    chosen_dtype = choose_dtype(dtype, chosen_device, compile=compile)
    checkpoint = _open(path, preset)
    check_memory(checkpoint, chosen_dtype, chosen_device)
    model = load_model(checkpoint, device=chosen_device, dtype=chosen_dtype)
    return Session(
        checkpoint=checkpoint,
        runner=Runner(model, batch_size=batch_size, compile=compile),
        tokenizer=checkpoint.load_tokenizer(),
        load_s=time.perf_counter() - start,
    )


def set_threads(threads: int) -> None:
    """Have the process compute with so many CPU threads; raises UserError for more than make sense here."""
    most = 4 * (os.cpu_count() or 1)
    if not 1 <= threads <= most:
        raise UserError(f"{threads} threads are not supported on this machine; give 1 to {most}")
    torch.set_num_threads(threads)


def check_memory(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
    """Raise UserError if the weights are larger than the memory that is free for them."""
    needed = sum(math.prod(shape) for shape in list_tensor_shapes(checkpoint.config).values()) * dtype.itemsize
    free = get_available_memory(device)
    if free is not None and needed > free:
        raise UserError(
            f"the weights of {checkpoint.path} take {needed / 1e9:.1f} GB in {str(dtype).removeprefix('torch.')} "
            f"and {free / 1e9:.1f} GB are free on {device.type}; use a smaller model or dtype"
        )


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


def choose_dtype(name: str | None, device: torch.device, *, compile: bool = False) -> torch.dtype:
    """The dtype of that name, or the device's fastest; raises UserError if the device cannot compute in it."""
    if name is None:
        if device.type == "cpu":
            return measure_cpu_dtype(compile)
        return torch.bfloat16 if supports_bfloat16(device) else torch.float16
    if name not in DTYPES:
        raise UserError(f"dtype {name!r} is not supported; use {', '.join(DTYPES)}")
    dtype = DTYPES[name]
    if device.type == "cpu" and dtype == torch.float16:
        raise UserError("dtype float16 is not supported on cpu, which has no fast arithmetic for it; use bfloat16")
    if device.type == "cuda" and dtype == torch.bfloat16 and not supports_bfloat16(device):
        raise UserError("dtype bfloat16 is not supported on a GPU older than sm_80; use float16")
    return dtype


def supports_bfloat16(device: torch.device) -> bool:
    """Whether a CUDA GPU computes in bfloat16: from sm_80 on."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def measure_cpu_dtype(compile: bool) -> torch.dtype:
    """Bfloat16 or float32, whichever multiplies a matrix with a vector sooner on this CPU; measured once.

    Half the bytes are no gain where a kernel has to widen every weight by hand, so it matters whether the run is
    compiled. Where nothing compiles, the eager kernels are measured.
    """
    facts = (describe_cpu(), torch.__version__, str(torch.get_num_threads()), str(compile))
    path = get_cache_dir() / "cpu-dtype" / f"{hashlib.sha256('|'.join(facts).encode()).hexdigest()[:24]}.json"
    names = ("float32", "bfloat16")
    seconds = read_times(path, names)
    if seconds is None:
        logger.info("measuring which dtype this CPU decodes faster in, this once")
        keeps = is_writable(path.parent)
        try:
            seconds = time_matrix_vector(names, compile_function(multiply) if compile else multiply)
        except CompilationError:
            seconds = time_matrix_vector(names, multiply)
            keeps = False  # a compiler may be installed later
        if keeps:
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
def time_matrix_vector(names: tuple[str, ...], product: Step) -> dict[str, float]:
    """The least of ten times, in seconds, of a product that no cache can hold; the dtypes take turns."""
    operands = {
        name: (torch.ones(1, 4096, dtype=DTYPES[name]), torch.ones(8192, 4096, dtype=DTYPES[name])) for name in names
    }
    seconds = dict.fromkeys(names, math.inf)
    for repeat in range(11):
        for name, (x, weight) in operands.items():
            start = time.perf_counter()
            product(x, weight)
            if repeat:  # the first call may compile
                seconds[name] = min(seconds[name], time.perf_counter() - start)
    return seconds


def _open(path: str | Path | None, preset: str | None) -> Checkpoint:
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
