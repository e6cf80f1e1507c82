"""The operators of the kernels as functions, those of the CPU with their shapes for the compiler.

Shapes: M rows of inputs, N out_features, K in_features, V vocabulary.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from typing import Literal, get_args

import torch
from torch import Tensor

from gptfast.errors import UserError
from gptfast.kernels.build import LIBRARY, BuildError, load_library

logger = logging.getLogger(__name__)

Kernels = Literal["cpp", "triton", "inductor", "torchao"]
"""What a model's products run on: ours for the CPU, ours for CUDA, what torch.compile generates for CUDA, or what
torchao calls there. A decode step's attention is ours with each of them."""
KernelChoice = Literal["auto", "triton", "inductor", "torchao"]
"""What may be asked for; `auto` is ours for the device."""
KERNEL_CHOICES: tuple[KernelChoice, ...] = get_args(KernelChoice)
LEAST_CAPABILITY = (8, 0)
"""Of a GPU for the Triton kernels, which multiply bfloat16 on tensor cores."""
MOST_CUDA_TOKENS = 16
"""Per row that `attention` takes at once on CUDA; on a CPU it takes any number."""


@functools.cache
def has_cpu_kernels() -> bool:
    """Whether the CPU kernels are there; they are built when this is first asked, once on a machine."""
    try:
        load_library()
    except BuildError as error:
        logger.warning(
            "%s; until then weights are expanded to the run's dtype, which takes several times the memory and time",
            error,
        )
        return False
    register_shapes()
    return True


@functools.cache
def has_triton_kernels() -> bool:
    """Whether the CUDA kernels can be had: Triton is installed. They are compiled when they first run."""
    if importlib.util.find_spec("triton") is None:
        logger.warning("Triton is not installed; until then weights are expanded to the run's dtype")
        return False
    from gptfast.kernels.cuda import attention, ops

    ops.register_operators()
    attention.register_operator()
    return True


def choose_kernels(device: torch.device, asked: KernelChoice = "auto") -> Kernels | None:
    """Those that are asked for, made ready; of `auto` None if there are none, so that torch's own operators do all.

    Raises UserError for others that the device cannot run; all of them need the Triton kernels, for attention at least.
    """
    if asked == "auto":
        if device.type == "cpu":
            return "cpp" if has_cpu_kernels() else None
        return "triton" if is_new_enough(device) and has_triton_kernels() else None
    if device.type != "cuda":
        raise UserError(f"kernels {asked} are asked for and the device is {device.type}; leave them out, or use cuda")
    if not is_new_enough(device):
        major, minor = torch.cuda.get_device_capability(device)
        raise UserError(f"kernels {asked} need a GPU of sm_80 or later, and this one is of sm_{major}{minor}; use auto")
    if importlib.util.find_spec("triton") is None:
        raise UserError(f"kernels {asked} need Triton, which is not installed; install triton, or use auto")
    return asked if has_triton_kernels() else None


def is_new_enough(device: torch.device) -> bool:
    """Whether it is a GPU that the Triton kernels can be compiled for."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY


def are_for_cuda(kernels: Kernels | None) -> bool:
    """Whether matrices lie on CUDA in forms of ours, and attention is Triton's."""
    return kernels is not None and kernels != "cpp"


def can_attend(kernels: Kernels | None, tokens: int) -> bool:
    """Whether `attention` takes so many tokens of a row at once."""
    return kernels == "cpp" or (kernels is not None and tokens <= MOST_CUDA_TOKENS)


def register_shapes() -> None:
    """Tell torch.compile what the operators of the CPU return."""

    @torch.library.register_fake(f"{LIBRARY}::linear")  # type: ignore[untyped-decorator]
    def linear_shape(x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int, rounds_inputs: bool) -> Tensor:
        return x.new_empty(*x.shape[:-1], out_features)

    @torch.library.register_fake(f"{LIBRARY}::embedding")  # type: ignore[untyped-decorator]
    def embedding_shape(tokens: Tensor, packed: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        return packed.new_empty(*tokens.shape, dim, dtype=dtype)

    @torch.library.register_fake(f"{LIBRARY}::attention")  # type: ignore[untyped-decorator]
    def attention_shape(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_scales: Tensor | None,
        v_scales: Tensor | None,
        input_pos: Tensor,
        sliding_window: int | None,
    ) -> Tensor:
        return q.new_empty(q.shape[0], q.shape[1], q.shape[2] * q.shape[3])


def linear(
    x: Tensor, packed: Tensor, bias: Tensor | None = None, *, out_features: int, rounds_inputs: bool = False
) -> Tensor:
    """Activations (..., K) in float32 or bfloat16 times a packed matrix (N, K), plus the bias: (..., N) in x's dtype.

    With `rounds_inputs` and a quantized matrix, x is rounded to int8 in groups of 32, and sums within a group are of
    integers; else weights take part with the values that they have. Sums are in float32. Up to 32 rows, or with
    `rounds_inputs` any number, a row's result does not depend on the rows beside it.
    """
    result: Tensor = torch.ops.gptfast.linear.default(x, packed, bias, out_features, rounds_inputs)
    return result


def embedding(tokens: Tensor, packed: Tensor, *, dim: int, dtype: torch.dtype) -> Tensor:
    """Rows `tokens` (...) int64 of a packed matrix (V, dim), expanded: (..., dim) of `dtype`."""
    result: Tensor = torch.ops.gptfast.embedding.default(tokens, packed, dim, dtype)
    return result


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    input_pos: Tensor,
    *,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    sliding_window: int | None = None,
    kernels: Kernels = "cpp",
) -> Tensor:
    """Attention of S tokens over the slots of a cache up to their own: (B, S, H * D) in q's dtype.

    Args:
        q: (B, S, H, D) float32 or bfloat16, contiguous. H is a multiple of the cache's heads K; H / K query heads in
            a row share one of them.
        k: (B or more, K, L, D) float32, bfloat16 or int8, the whole buffer; the first B rows are read.
        v: The same for the values.
        input_pos: (S,) int64 below L, ascending; token i sees slots 0 to `input_pos[i]`.
        k_scales: (B or more, K, L, 1) float32, with int8 only: a key is its codes times this.
        v_scales: The same for the values.
        sliding_window: How many slots a token sees at most, its own among them.
        kernels: What the model runs on; but for `cpp`, Triton's computes it, which takes float16 too and at most 16
            tokens.

    Scores are divided by sqrt(D); sums are in float32. Of finite inputs, a token's result depends neither on the
    tokens beside it nor on the number of threads.
    """
    operators = torch.ops.gptfast
    operator = operators.attention if kernels == "cpp" else operators.cuda_attention
    result: Tensor = operator.default(q, k, v, k_scales, v_scales, input_pos, sliding_window)
    return result
