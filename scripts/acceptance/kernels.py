"""Whether every kernel computes what it should, to the same bits each time and however many rows there are."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from acceptance.findings import Findings
from acceptance.precompile import Attention, compile_all
from acceptance.random_weights import BF16, FP8, INT4_G32, INT4_G128, INT8
from acceptance.timing import find_device
from gptfast.kernels.cuda.configurations import MAX_ROWS, identify_gpu
from gptfast.kernels.cuda.packing import PackedWeight, unpack
from gptfast.kernels.cuda.precompilation import Call
from gptfast.kernels.cuda.products import Format, Product, draw_packed, prepare_product
from gptfast.kernels.cuda.timing import free_memory
from gptfast.model import round_to_int8
from tests.reference.attention import Cache, attend

FORMATS = (
    BF16,
    Format("fp16"),
    FP8,
    INT8,
    Format("int8", 32),
    *(Format("int4", size, has_mins) for size in (32, 64, 128, None) for has_mins in (False, True)),
    Format("int8", 32, has_mins=True),
)
MAIN_FORMATS = (BF16, FP8, INT8, INT4_G32, INT4_G128)
ODD_SHAPES = ((17, 576), (5, 1536), (33, 90), (1, 32))
SHAPES = ((6144, 4096), (4096, 4096), (4096, 14_336), (3072, 2048), (2048, 8192))
"""Of Llama 3.1 8B and 3.2 1B, for the formats that models have; (out_features, in_features)."""
ROWS = (1, 2, 5, MAX_ROWS, MAX_ROWS + 1)
REPEATS = 100
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 6e-3, torch.float16: 1e-3}
"""Of the norm, by the dtype of inputs, to which weights may be rounded and results are."""
ATTENTION_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 2e-3}
KERNEL_FILES = "gptfast/kernels/cuda/linear.py, and its configuration (gptfast/kernels/cuda/configurations)"
ATTENTION_FILE = "gptfast/kernels/cuda/attention.py"
RESOURCES_TITLE = "Kernels as this GPU has loaded them, the most of all their configurations"


@dataclass(frozen=True)
class Heads:
    """Query heads, key/value heads and their dimension."""

    queries: int
    kv: int
    dim: int


HEADS = (Heads(32, 8, 128), Heads(32, 8, 64), Heads(9, 3, 64))
"""Of Llama 3.1 8B, Llama 3.2 1B and SmolLM2 135M."""
CHUNK_SLOTS = 256
"""That attention is cut into."""
TOKENS = (1, 2, 5, MAX_ROWS)


def run(findings: Findings) -> None:
    """Check them all on the GPU."""
    device = find_device()
    shapes = {form: [*ODD_SHAPES, *(SHAPES if form in MAIN_FORMATS else SHAPES[:1])] for form in FORMATS}
    attended = list(itertools.product(HEADS, (torch.bfloat16, torch.int8)))
    calls: list[Call] = list(list_products(shapes))
    calls += [
        Attention(heads.queries, heads.kv, heads.dim, tokens, cache_dtype)
        for (heads, cache_dtype), tokens in itertools.product(attended, TOKENS)
    ]
    errors = compile_all(calls, identify_gpu(device))
    findings.note(compile_errors=errors)
    findings.check("all kernels compile", not errors, f"{len(errors)} do not", "compile_errors in kernels.json")
    for form, sizes in shapes.items():
        check_format(findings, device, form, sizes, torch.bfloat16, REPEATS)
        free_memory(device)
    for heads, cache_dtype in attended:
        check_attention(findings, device, heads, cache_dtype, torch.bfloat16, list_starts(CHUNK_SLOTS), REPEATS)
    check_resources(findings, list_loaded(device))


def list_products(shapes: dict[Format, list[tuple[int, int]]]) -> Iterator[Product]:
    """What `check_format` launches."""
    for form, sizes in shapes.items():
        for out_features, in_features in sizes:
            if form.fits(in_features):
                for rows in (1, 2, MAX_ROWS + 1):
                    yield Product(form, out_features, in_features, rows)


def list_starts(chunk: int) -> tuple[int, ...]:
    """Positions around the borders of the chunks that attention is cut into."""
    return (0, 1, chunk - 1, chunk, chunk + 1, 4 * chunk - 3, 8 * chunk)


def check_format(
    findings: Findings,
    device: torch.device,
    form: Format,
    shapes: Iterable[tuple[int, int]],
    dtype: torch.dtype,
    repeats: int,
) -> None:
    """Errors, bits of rows and of repeats, over shapes that its groups divide."""
    generator = torch.Generator(device).manual_seed(0)
    errors: dict[str, float] = {}
    unequal: list[str] = []
    for out_features, in_features in shapes:
        if not form.fits(in_features):
            continue
        weight = draw_packed(form, out_features, in_features, generator)
        x = torch.randn(max(ROWS), in_features, device=device, generator=generator).to(dtype)
        for rows in ROWS:
            found = prepare_product(x[:rows], weight)()
            errors[f"{out_features} x {in_features}, {rows} rows"] = measure_error(found, x[:rows], weight)
        unequal += find_unequal(weight, x, repeats)
    worst = max(errors, key=lambda case: rank(errors[case]))
    findings.check(
        f"{form.name}: products are those of the matrix",
        errors[worst] < TOLERANCES[dtype],
        f"relative error at most {errors[worst]:.2g} ({worst}), allowed {TOLERANCES[dtype]:.2g}",
        KERNEL_FILES,
    )
    findings.check(
        f"{form.name}: rows and repeats have the same bits",
        not unequal,
        f"{len(unequal)} cases differ{': ' + unequal[0] if unequal else ''}",
        f"a race, or a sum whose order depends on the number of rows, in {KERNEL_FILES}",
    )


def rank(error: float) -> float:
    """NaN is the worst."""
    return error if error == error else float("inf")


def measure_error(found: Tensor, x: Tensor, weight: PackedWeight) -> float:
    """The norm of the difference from the product in float32, over what it would be of terms of random signs.

    A sum that happens to be near zero then is not held to more digits than its terms have.
    """
    matrix, inputs = unpack(weight), x.float()
    was_allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    difference = found.float() - inputs @ matrix.T
    squares = inputs.square() @ matrix.square().T
    torch.backends.cuda.matmul.allow_tf32 = was_allowed
    return float(difference.norm() / squares.sum().sqrt())


def find_unequal(weight: PackedWeight, x: Tensor, repeats: int) -> list[str]:
    """Cases with other bits: of a row alone and among others, and of the same product again."""
    size = f"{weight.shape[0]} x {weight.shape[1]}"
    together = prepare_product(x[:MAX_ROWS], weight, exact_rows=True)()
    unequal = []
    for first, count in ((0, 1), (7, 1), (MAX_ROWS - 1, 1), (3, 2), (2, 5)):
        some = slice(first, first + count)
        if not torch.equal(prepare_product(x[some], weight, exact_rows=True)(), together[some]):
            unequal.append(f"{size}, rows {first} to {first + count - 1} of {MAX_ROWS}")
    for rows in (1, 5):
        product = prepare_product(x[:rows], weight)
        expected = product()
        # One comparison on the host, so that the launches follow each other closely.
        differs = torch.zeros((), dtype=torch.bool, device=x.device)
        for _ in range(repeats):
            differs |= (product() != expected).any()
        if bool(differs):
            unequal.append(f"{size}, {rows} rows, one of {repeats} repeats")
    return unequal


def check_attention(
    findings: Findings,
    device: torch.device,
    heads: Heads,
    cache_dtype: torch.dtype,
    dtype: torch.dtype,
    starts: Sequence[int],
    repeats: int,
    tokens: Sequence[int] = TOKENS,
) -> None:
    """Errors at positions from each start on, bits of a token alone and among others, and of repeats."""
    generator = torch.Generator(device).manual_seed(0)
    cache = draw_cache(heads, max(starts) + 2 * max(tokens), cache_dtype, generator)
    errors: dict[str, float] = {}
    unequal: list[str] = []
    for start, count in itertools.product(starts, tokens):
        # Scores spread over several powers of e.
        q = 2 * torch.randn(1, count, heads.queries, heads.dim, device=device, generator=generator)
        q = q.to(dtype)
        input_pos = torch.arange(start, start + count, device=device)
        found = attend_by_kernel(q, cache, input_pos)
        errors[f"{count} tokens from {start} on"] = measure_attention_error(found, q, cache, input_pos)
        alone = attend_by_kernel(q[:, -1:].contiguous(), cache, input_pos[-1:])
        if not torch.equal(alone, found[:, -1:]):
            unequal.append(f"the last of {count} tokens from {start} on, alone")
        if any(not torch.equal(attend_by_kernel(q, cache, input_pos), found) for _ in range(repeats // len(starts))):
            unequal.append(f"{count} tokens from {start} on, repeated")
    worst = max(errors, key=lambda case: rank(errors[case]))
    name = f"attention, {heads.queries}/{heads.kv} heads of {heads.dim}, cache of {cache_dtype}".replace("torch.", "")
    allowed = ATTENTION_TOLERANCES[dtype]
    findings.check(
        f"{name}: results are those of the formula",
        errors[worst] < allowed,
        f"relative error at most {errors[worst]:.2g} ({worst}), allowed {allowed:.2g}",
        ATTENTION_FILE,
    )
    findings.check(
        f"{name}: tokens and repeats have the same bits",
        not unequal,
        f"{len(unequal)} cases differ{': ' + unequal[0] if unequal else ''}",
        f"a race, or a tile that changes the order of sums, in {ATTENTION_FILE}",
    )


def draw_cache(heads: Heads, slots: int, dtype: torch.dtype, generator: torch.Generator) -> Cache:
    """Keys and values near 1, of int8 rounded as the model rounds them."""
    shape = 1, heads.kv, slots, heads.dim
    k, v = (torch.randn(shape, device=generator.device, generator=generator) for _ in range(2))
    if dtype != torch.int8:
        return Cache(k.to(dtype), v.to(dtype))
    (k, k_scales), (v, v_scales) = round_to_int8(k), round_to_int8(v)
    return Cache(k, v, k_scales, v_scales)


def attend_by_kernel(q: Tensor, cache: Cache, input_pos: Tensor) -> Tensor:
    """Attention as the model has it."""
    from gptfast.kernels.cuda import attention

    return attention.attend(q, cache.k, cache.v, input_pos, k_scales=cache.k_scales, v_scales=cache.v_scales)


def measure_attention_error(found: Tensor, q: Tensor, cache: Cache, input_pos: Tensor) -> float:
    """The difference from the formula in float64 over its norm."""
    with q.device:
        expected = attend(q, cache, input_pos)
    return float((found.double() - expected).norm() / expected.norm())


def list_loaded(device: torch.device) -> dict[str, list[Any]]:
    """What Triton has compiled and loaded in this process of every kernel that was launched."""
    from gptfast.kernels.cuda import attention, fused, fused_attention, linear

    kernels = (
        fused.embed,
        fused.project_qkv,
        fused.add_product,
        fused.project_swiglu,
        fused.project_head,
        fused_attention.attend_and_combine,
        linear.multiply_vector,
        linear.multiply_rows,
        linear.expand_rows,
        attention.attend_chunk,
        attention.combine_chunks,
    )
    loaded = {kernel.fn.__name__: list(kernel.device_caches[device.index][0].values()) for kernel in kernels}
    return {name: programs for name, programs in loaded.items() if programs}


def check_resources(findings: Findings, loaded: Mapping[str, Sequence[Any]]) -> None:
    """What programs of each kernel take; none may keep in memory what does not fit its registers."""
    for name, programs in loaded.items():
        figures = {
            "registers": max(program.n_regs for program in programs),
            "spilled words": max(program.n_spills for program in programs),
            "shared bytes": max(program.metadata.shared for program in programs),
        }
        row = {column: str(value) for column, value in figures.items()}
        findings.add_row(RESOURCES_TITLE, {"kernel": name, "compiled": str(len(programs))} | row)
    spilling = [name for name, programs in loaded.items() if any(program.n_spills for program in programs)]
    findings.check(
        "no kernel spills registers",
        bool(loaded) and not spilling,
        ", ".join(spilling) or f"{len(loaded)} kernels",
        f"this GPU's configurations of {KERNEL_FILES}; {ATTENTION_FILE}",
    )
