"""On a machine with a GPU the kernels run there, on others under Triton's interpreter."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.reference.attention import Cache, attend, make_cache
from tests.reference.triton_compilation import Launch, Program, compile_offline

triton = pytest.importorskip("triton")
attention = pytest.importorskip("gptfast.kernels.cuda.attention")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FLOAT, HALF, BFLOAT, INT8 = torch.float32, torch.float16, torch.bfloat16, torch.int8
DTYPES = [FLOAT, HALF, BFLOAT, INT8]
CHUNK = attention.CHUNK
SPARE = 3  # slots after the last position
CUDA_NAMES = {FLOAT: "fp32", HALF: "fp16", BFLOAT: "bf16", INT8: "i8"}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def attend_by_kernel(
    q: Tensor,
    cache: Cache,
    input_pos: Tensor,
    sliding_window: int | None = None,
    scratch: attention.Scratch | None = None,
) -> Tensor:
    q, k, v, input_pos = (x.to(DEVICE) for x in (q, cache.k, cache.v, input_pos))
    k_scales, v_scales = (x if x is None else x.to(DEVICE) for x in (cache.k_scales, cache.v_scales))
    result = attention.attend(
        q,
        k,
        v,
        input_pos,
        k_scales=k_scales,
        v_scales=v_scales,
        sliding_window=sliding_window,
        scratch=scratch,
    )
    return result.cpu()


def make_call(
    dtype: torch.dtype,
    *,
    start: int = 0,
    tokens: int = 1,
    batch: int = 1,
    heads: int = 4,
    kv_heads: int = 1,
    dim: int = 64,
    query_dtype: torch.dtype = FLOAT,
) -> tuple[Tensor, Cache, Tensor]:
    """Queries of tokens from a position on, whose scores spread over several powers of e, and a cache."""
    q = (torch.randn(batch, tokens, heads, dim) * 2).to(query_dtype)
    return q, make_cache(dtype, batch, kv_heads, start + tokens + SPARE, dim), torch.arange(start, start + tokens)


def assert_is_reference(q: Tensor, cache: Cache, input_pos: Tensor, sliding_window: int | None = None) -> None:
    actual = attend_by_kernel(q, cache, input_pos, sliding_window)
    assert actual.dtype == q.dtype
    expected = attend(q, cache, input_pos, sliding_window)
    if DEVICE == "cuda":  # where operands are rounded too
        tolerance = 1e-4 if q.dtype == FLOAT else torch.finfo(BFLOAT).eps
    else:
        tolerance = 1e-5 if q.dtype == FLOAT else torch.finfo(q.dtype).eps
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [FLOAT, INT8])
@pytest.mark.parametrize(
    ("position", "sliding_window"),
    [
        *((position, None) for position in (0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 1000)),
        *((0, 1), (CHUNK, 1), (CHUNK - 1, CHUNK), (1000, CHUNK + 1)),
    ],
)
def test_a_token_attends_over_the_slots_up_to_its_own(
    dtype: torch.dtype, position: int, sliding_window: int | None
) -> None:
    assert_is_reference(*make_call(dtype, start=position), sliding_window)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tokens"),
    [
        *((2, 2, 1), (3, 1, 2), (8, 2, 5), (8, 1, 5), (3, 1, 16)),
        *(
            pytest.param(heads, kv_heads, tokens, marks=pytest.mark.slow)
            for heads, kv_heads in ((2, 2), (3, 1), (8, 2), (8, 1))
            for tokens in (1, 2, 5, 15, 16)
        ),
    ],
)
def test_heads_and_tokens_may_be_of_any_number(heads: int, kv_heads: int, tokens: int) -> None:
    sizes = {"tokens": tokens, "heads": heads, "kv_heads": kv_heads, "dim": 32}
    assert_is_reference(*make_call(INT8, start=CHUNK - 3, query_dtype=HALF, **sizes), 100)


@pytest.mark.parametrize(
    ("query_dtype", "dtype", "dim"),
    [
        *((FLOAT, BFLOAT, 80), (HALF, HALF, 80), (HALF, FLOAT, 80), (BFLOAT, INT8, 80)),
        *(
            pytest.param(query_dtype, dtype, 96, marks=pytest.mark.slow)
            for query_dtype in (FLOAT, HALF, BFLOAT)
            for dtype in DTYPES
        ),
        *((BFLOAT, BFLOAT, dim) for dim in (2, 64, 100, 128, 256)),
    ],
)
def test_heads_may_be_of_any_width_and_dtype(query_dtype: torch.dtype, dtype: torch.dtype, dim: int) -> None:
    assert_is_reference(*make_call(dtype, start=CHUNK - 1, tokens=2, heads=2, dim=dim, query_dtype=query_dtype))


def test_more_chunks_than_are_combined_at_once_are_combined() -> None:
    start = (attention.COMBINED + 1) * CHUNK
    q, cache, _ = make_call(HALF, start=start, tokens=2, heads=2, dim=16, query_dtype=HALF)
    assert_is_reference(q, cache, torch.tensor([start - CHUNK - 1, start - CHUNK]))
    assert_is_reference(q, cache, torch.tensor([start - 3 * CHUNK, start + 1]), 2 * CHUNK)


def test_positions_may_have_gaps() -> None:
    q, cache, _ = make_call(FLOAT, start=600, tokens=4)
    assert_is_reference(q, cache, torch.tensor([3, 255, 512, 600]))
    assert_is_reference(q, cache, torch.tensor([3, 3, 512, 600]), 20)


def test_rows_of_a_batch_have_their_own_slots_and_further_ones_are_not_read() -> None:
    q, cache, input_pos = make_call(INT8, start=300, tokens=3, batch=3, kv_heads=2)
    assert_is_reference(q, cache, input_pos)
    together = attend_by_kernel(q, cache, input_pos)
    assert torch.equal(attend_by_kernel(q[:1], cache, input_pos), together[:1])


@pytest.fixture
def _rows_do_not_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the interpreter multiply every row alike, as tensor cores do; the sums of NumPy's library differ by row."""
    monkeypatch.setattr(np, "matmul", lambda a, b, dtype: np.einsum("mk,kn->mn", a, b, dtype=dtype))


@pytest.mark.usefixtures("_rows_do_not_mix")
@pytest.mark.parametrize(
    ("query_dtype", "dtype", "sliding_window"),
    [
        (BFLOAT, INT8, None),
        (HALF, HALF, 100),
        *(pytest.param(FLOAT, dtype, None, marks=pytest.mark.slow) for dtype in DTYPES),
    ],
)
def test_a_token_gets_the_same_bits_alone_among_others_and_in_a_longer_cache(
    query_dtype: torch.dtype, dtype: torch.dtype, sliding_window: int | None
) -> None:
    sizes = {"start": CHUNK - 5, "tokens": attention.MAX_TOKENS, "heads": 3, "dim": 32}
    q, cache, input_pos = make_call(dtype, query_dtype=query_dtype, **sizes)
    longer = lengthen(cache, 2 * CHUNK)
    together = attend_by_kernel(q, cache, input_pos, sliding_window)
    for first, count in ((0, 1), (5, 1), (15, 1), (3, 2), (2, 5), (0, 16)):
        some = slice(first, first + count)
        result = attend_by_kernel(q[:, some].contiguous(), longer, input_pos[some], sliding_window)
        assert torch.equal(result, together[:, some])


@pytest.mark.usefixtures("_rows_do_not_mix")
@pytest.mark.parametrize("dtype", [HALF, INT8])
def test_sums_of_a_chunk_have_the_same_bits_in_a_tile_of_any_size(dtype: torch.dtype) -> None:
    tokens, heads = attention.MAX_TOKENS, 3
    call = make_call(dtype, start=CHUNK + 60, tokens=tokens, heads=heads, dim=32, query_dtype=HALF)
    together = sum_chunks(*call)
    for first, count in ((0, 1), (7, 1), (2, 5), (1, 11)):
        q, cache, input_pos = call[0][:, first : first + count].contiguous(), call[1], call[2][first : first + count]
        for some, among_others in zip(sum_chunks(q, cache, input_pos), together, strict=True):
            assert torch.equal(some, among_others[:, first : first + count])


def sum_chunks(q: Tensor, cache: Cache, input_pos: Tensor) -> list[Tensor]:
    """What the first kernel leaves in float32, each (C, S, H, ...)."""
    _, tokens, heads, dim = q.shape
    slots = cache.k.shape[2]
    scratch = attention.make_scratch(1, tokens, heads, dim, slots, device=torch.device(DEVICE))
    attend_by_kernel(q, cache, input_pos, scratch=scratch)
    return [each.cpu().view(-1, tokens, heads, *each.shape[1:]) for each in scratch]


def lengthen(cache: Cache, slots: int) -> Cache:
    """The same with more slots, of any content."""
    dim = cache.k.shape[-1]
    rest = make_cache(cache.k.dtype, *cache.k.shape[:2], slots, dim)
    pairs = ((cache.k, rest.k), (cache.v, rest.v), (cache.k_scales, rest.k_scales), (cache.v_scales, rest.v_scales))
    return Cache(*(None if a is None or b is None else torch.cat((a, b), dim=2) for a, b in pairs))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [FLOAT, INT8])
@pytest.mark.parametrize("position", [0, CHUNK - 2])
@pytest.mark.parametrize("sliding_window", [None, 30])
def test_slots_that_no_token_sees_are_not_looked_at(
    dtype: torch.dtype, position: int, sliding_window: int | None
) -> None:
    q, cache, input_pos = make_call(dtype, start=position, tokens=2)
    before = attend_by_kernel(q, cache, input_pos, sliding_window)
    end, start = position + 2, 0 if sliding_window is None else max(position - sliding_window + 1, 0)
    for values in (cache.k, cache.v, cache.k_scales, cache.v_scales):
        if values is not None:
            garbage = 127 if values.dtype == INT8 else torch.nan
            values[:, :, end:], values[:, :, :start] = garbage, garbage
    assert torch.equal(attend_by_kernel(q, cache, input_pos, sliding_window), before)


def test_a_slot_between_the_tokens_of_a_call_hides_from_the_first_of_them() -> None:
    q, cache, input_pos = make_call(FLOAT, start=20, tokens=4)
    before = attend_by_kernel(q, cache, input_pos)
    cache.k[:, :, 22:], cache.v[:, :, 22:] = 1e30, -1e30
    assert torch.equal(attend_by_kernel(q, cache, input_pos)[:, :2], before[:, :2])


@pytest.mark.parametrize("size", [1e-30, 1e4])
def test_scores_of_any_size_give_weights_that_add_up_to_one(size: float) -> None:
    q, cache, input_pos = make_call(FLOAT, start=400)
    actual = attend_by_kernel(q * size, Cache(cache.k, torch.ones_like(cache.v)), input_pos)
    torch.testing.assert_close(actual, torch.ones_like(actual))


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # of the interpreter
def test_a_query_that_is_not_a_number_gives_no_number() -> None:
    q, cache, input_pos = make_call(FLOAT, start=300)
    q[0, 0, 3, 5] = torch.nan
    actual = attend_by_kernel(q, cache, input_pos).view(4, 64)
    assert actual[3].isnan().all()
    assert actual[:3].isfinite().all()


def test_what_a_scratch_held_before_changes_nothing() -> None:
    q, cache, input_pos = make_call(FLOAT, start=CHUNK, tokens=3)
    expected = attend_by_kernel(q, cache, input_pos, 20)
    scratch = attention.make_scratch(1, 5, 4, 64, cache.k.shape[2], device=torch.device(DEVICE))
    for tensor in scratch:
        tensor.fill_(torch.nan)
    assert torch.equal(attend_by_kernel(q, cache, input_pos, 20, scratch), expected)
    assert scratch.maxima.isfinite().any()


@pytest.mark.parametrize("dtype", [FLOAT, INT8])
def test_the_operator_keeps_what_torch_asks_of_one(dtype: torch.dtype) -> None:
    attention.register_operator()
    q, cache, input_pos = make_call(dtype, start=5, tokens=2)
    tensors = (q, cache.k, cache.v, cache.k_scales, cache.v_scales, input_pos)
    arguments = (*(x if x is None else x.to(DEVICE) for x in tensors), 4)
    torch.library.opcheck(torch.ops.gptfast.cuda_attention.default, arguments)
    actual = torch.ops.gptfast.cuda_attention.default(*arguments)
    assert torch.equal(actual.cpu(), attend_by_kernel(q, cache, input_pos, 4))


def test_what_does_not_fit_is_refused() -> None:
    q, cache, pos = make_call(FLOAT, start=5, tokens=2, heads=8, kv_heads=2)
    k, v = cache.k, cache.v
    codes, scales = k.to(INT8), torch.ones(1, 2, k.shape[2], 1)
    small = attention.make_scratch(1, 1, 8, 64, k.shape[2], device=torch.device("cpu"))
    many = torch.zeros(1, 17, 8, 64)
    refused: list[tuple[str, tuple[Tensor, Tensor, Tensor, Tensor], dict[str, object]]] = [
        ("queries must be", (q[0], k, v, pos), {}),
        ("queries must be", (q.double(), k, v, pos), {}),
        ("queries must be", (q.transpose(1, 2), k, v, pos), {}),
        ("queries must be", (q[:0], k, v, pos), {}),
        ("up to 16 tokens", (many, k, v, torch.arange(17)), {}),
        ("alike", (q, k, v.bfloat16(), pos), {}),
        ("alike", (q, k, v[:, :, 1:], pos), {}),
        ("alike", (q, k[:, :, ::2], v[:, :, ::2], pos), {}),
        ("float16 or int8", (q, k.double(), v.double(), pos), {}),
        ("do not fit", (q.expand(2, -1, -1, -1).contiguous(), k, v, pos), {}),
        ("do not fit", (q[:, :, :7].contiguous(), k, v, pos), {}),
        ("do not fit", (q[..., :32].contiguous(), k, v, pos), {}),
        ("needs scales", (q, codes, codes, pos), {}),
        ("needs scales", (q, codes, codes, pos), {"k_scales": scales}),
        ("needs scales", (q, k, v, pos), {"k_scales": scales, "v_scales": scales}),
        ("scales must be", (q, codes, codes, pos), {"k_scales": scales, "v_scales": scales[:, :, 1:]}),
        ("scales must be", (q, codes, codes, pos), {"k_scales": scales.bfloat16(), "v_scales": scales}),
        ("positions must be", (q, k, v, pos[:1]), {}),
        ("positions must be", (q, k, v, pos.int()), {}),
        ("sliding window", (q, k, v, pos), {"sliding_window": 0}),
        ("a scratch", (q, k, v, pos), {"scratch": small}),
        ("a scratch", (q, k, v, pos), {"scratch": attention.Scratch(torch.empty(999, 32), *small[1:])}),
    ]
    for words, tensors, options in refused:
        with pytest.raises(ValueError, match=words):
            attention.attend(*tensors, **options)  # type: ignore[arg-type]


class Configuration(NamedTuple):
    """What a call is compiled for."""

    query_dtype: torch.dtype
    dtype: torch.dtype
    dim: int = 128
    window: int | None = None

    @property
    def is_exact(self) -> bool:
        exact: bool = attention.is_exact(self.query_dtype, self.dtype)
        return exact


QUICK = [Configuration(BFLOAT, BFLOAT), Configuration(BFLOAT, INT8)]
ALL = [
    *itertools.starmap(Configuration, itertools.product((BFLOAT, HALF, FLOAT), DTYPES, (64, 128))),
    *(Configuration(BFLOAT, dtype, 80, 4096) for dtype in DTYPES),
]


@pytest.mark.parametrize("configurations", [QUICK, pytest.param(ALL, marks=pytest.mark.slow)], ids=["quick", "all"])
def test_compiled_it_reads_16_bytes_at_once_and_multiplies_on_tensor_cores(configurations: list[Configuration]) -> None:
    launches = []
    for each in configurations:
        launches += [launch_attention(each, rows=16), launch_attention(each, rows=32), launch_combination(each)]
    results = iter(compile_offline(launches))
    for each in configurations:
        few, many, combination = next(results), next(results), next(results)
        for architecture in few:
            assert_reads_well(few[architecture], each)
            assert_reads_well(many[architecture], each)
            assert_computes_rows_alike(few[architecture], many[architecture], each)
            combination[architecture].assert_keeps_to_registers()
            assert_loads_chunks_together(combination[architecture])


def launch_attention(configuration: Configuration, rows: int) -> Launch:
    """The kernel for so many rows of queries, as `attend` launches it on a GPU."""
    query_dtype, dtype, dim, window = configuration
    exact = configuration.is_exact
    tile = attention.choose_tile(rows, dim, exact=exact)
    arguments = {
        **dict.fromkeys(("values", "maxima", "weights"), "*fp32"),
        "q": f"*{CUDA_NAMES[query_dtype]}",
        **dict.fromkeys(("k", "v"), f"*{CUDA_NAMES[dtype]}"),
        **dict.fromkeys(("k_scales", "v_scales"), "*fp32" if dtype == INT8 else None),
        "input_pos": "*i64",
        **{"S": 1, "L": 1000, "window": window},
        "scale": math.log2(math.e) / math.sqrt(dim),
        **{"K": 8, "G": 4, "D": dim},
        "key_operand": name_type(FLOAT if exact else query_dtype),
        "value_operand": name_type(FLOAT if exact else BFLOAT if dtype == INT8 else query_dtype),
        "block_rows": tile.rows,
        "block_dim": triton.next_power_of_2(dim),
        "chunk_slots": CHUNK,
        "block_slots": tile.slots,
    }
    return Launch("gptfast.kernels.cuda.attention:attend_chunk", arguments, tile.warps, tile.stages, fuses=False)


def name_type(dtype: torch.dtype) -> str:
    """As Triton's language calls it."""
    return f"tl.{str(dtype).removeprefix('torch.')}"


def launch_combination(configuration: Configuration) -> Launch:
    """The second kernel, as `attend` launches it on a GPU."""
    arguments = {
        "out": f"*{CUDA_NAMES[configuration.query_dtype]}",
        **dict.fromkeys(("values", "maxima", "weights"), "*fp32"),
        "input_pos": "*i64",
        **{"C": 4, "window": configuration.window},
        "scale": math.log2(math.e) / math.sqrt(configuration.dim),
        **{"H": 32, "D": configuration.dim},
        "block_heads": attention.choose_heads(configuration.dim),
        "block_dim": attention.pad_dim(configuration.dim),
        "chunk_slots": CHUNK,
        "block_chunks": attention.COMBINED,
    }
    return Launch("gptfast.kernels.cuda.attention:combine_chunks", arguments, warps=1, fuses=False)


def assert_loads_chunks_together(program: Program) -> None:
    """A block's values, maxima and weights are loaded once, by 16 bytes of values, before any is waited for."""
    assert program.count(r"LDG\S*\.128") == attention.COMBINED
    assert program.count(r"LDG\S*STRONG") == 3 * attention.COMBINED


def assert_reads_well(program: Program, configuration: Configuration) -> None:
    """Nothing is spilled, and what is on its way of the cache comes by 16 bytes at once."""
    program.assert_keeps_to_registers()
    assert program.shared_bytes <= 99 * 1024
    tile = attention.choose_tile(16, configuration.dim, exact=configuration.is_exact)
    block_bytes = tile.slots * triton.next_power_of_2(configuration.dim) * configuration.dtype.itemsize
    assert program.count(r"LDGSTS\S*\.128") == tile.stages * 2 * block_bytes // (16 * 32 * tile.warps)
    scales = program.count(r"LDGSTS\S*\.E$")
    assert (scales > 0) == (configuration.dtype == INT8)
    assert program.count("LDGSTS") == program.count(r"LDGSTS\S*\.128") + scales


def assert_computes_rows_alike(few: Program, many: Program, configuration: Configuration) -> None:
    """More rows take more of the same instruction, and Hopper's and Blackwell's for 64 rows is not among them."""
    names = {each.name for each in few.instructions if "MMA" in each.name}
    assert names == {each.name for each in many.instructions if "MMA" in each.name}
    assert all(name.startswith("HMMA") for name in names)
    assert many.count("HMMA") == (1 if configuration.is_exact else 2) * few.count("HMMA") > 0
