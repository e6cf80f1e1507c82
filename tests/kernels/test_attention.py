from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gptfast.kernels import ops
from tests.reference.attention import Cache, attend, make_cache

FLOAT, BFLOAT, INT8 = torch.float32, torch.bfloat16, torch.int8
DTYPES = [FLOAT, BFLOAT, INT8]
CHUNK = 128  # the slots that the kernel sums up at once
SPARE = 3  # slots after the last position


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    assert ops.has_cpu_kernels()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def attend_by_kernel(q: Tensor, cache: Cache, input_pos: Tensor, sliding_window: int | None = None) -> Tensor:
    scales = {"k_scales": cache.k_scales, "v_scales": cache.v_scales}
    return ops.attention(q, cache.k, cache.v, input_pos, **scales, sliding_window=sliding_window)


def make_call(
    dtype: torch.dtype,
    *,
    start: int = 0,
    tokens: int = 1,
    batch: int = 1,
    heads: int = 8,
    kv_heads: int = 2,
    dim: int = 64,
) -> tuple[Tensor, Cache, Tensor]:
    """Queries of tokens from a position on, whose scores spread over several powers of e, and a cache."""
    q = torch.randn(batch, tokens, heads, dim) * 2
    return q, make_cache(dtype, batch, kv_heads, start + tokens + SPARE, dim), torch.arange(start, start + tokens)


def assert_is_reference(q: Tensor, cache: Cache, input_pos: Tensor, sliding_window: int | None = None) -> None:
    actual = attend_by_kernel(q, cache, input_pos, sliding_window)
    expected = attend(q, cache, input_pos, sliding_window)
    torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("position", [0, 1, 31, 32, CHUNK - 2, CHUNK - 1, CHUNK, 4 * CHUNK - 1, 4 * CHUNK, 1000])
@pytest.mark.parametrize("sliding_window", [None, 1, CHUNK + 1])
def test_a_token_attends_over_the_slots_up_to_its_own(
    dtype: torch.dtype, position: int, sliding_window: int | None
) -> None:
    assert_is_reference(*make_call(dtype, start=position), sliding_window)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [2, 6, 16, 64, 80, 96, 100, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (9, 3), (14, 2), (32, 8), (71, 1)])
def test_heads_may_be_of_any_width_and_number(dtype: torch.dtype, dim: int, heads: int, kv_heads: int) -> None:
    assert_is_reference(*make_call(dtype, start=CHUNK - 3, tokens=5, heads=heads, kv_heads=kv_heads, dim=dim))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("start", "tokens"), [(0, 32), (CHUNK - 20, 33), (0, 256), (300, 256)])
@pytest.mark.parametrize("sliding_window", [None, 50])
def test_a_prompt_is_read_in_chunks(dtype: torch.dtype, start: int, tokens: int, sliding_window: int | None) -> None:
    assert_is_reference(*make_call(dtype, start=start, tokens=tokens, heads=9, kv_heads=3), sliding_window)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_a_batch_have_their_own_slots_and_further_ones_are_not_read(dtype: torch.dtype) -> None:
    q, cache, input_pos = make_call(dtype, start=200, tokens=3, batch=4)
    assert_is_reference(q, cache, input_pos)
    alone = attend_by_kernel(q[:1], cache, input_pos)
    assert torch.equal(alone, attend_by_kernel(q, cache, input_pos)[:1])


def test_bfloat16_queries_give_the_rounded_result_of_float32_ones() -> None:
    q, cache, input_pos = make_call(BFLOAT, start=300, tokens=4)
    q = q.bfloat16()
    actual = attend_by_kernel(q, cache, input_pos)
    assert actual.dtype == BFLOAT
    assert torch.equal(actual, attend_by_kernel(q.float(), cache, input_pos).bfloat16())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("start", "tokens"), [(0, 16), (CHUNK - 5, 9), (777, 2), (500, 128)])
@pytest.mark.parametrize("sliding_window", [None, 100])
def test_a_token_alone_gets_the_bits_it_gets_among_others_on_any_number_of_threads(
    dtype: torch.dtype, threads: int, start: int, tokens: int, sliding_window: int | None
) -> None:
    q, cache, input_pos = make_call(dtype, start=start, tokens=tokens, heads=9, kv_heads=3)
    torch.set_num_threads(threads)
    together = attend_by_kernel(q, cache, input_pos, sliding_window)
    torch.set_num_threads(1)
    for token in range(tokens):
        alone = attend_by_kernel(
            q[:, token : token + 1].contiguous(), cache, input_pos[token : token + 1], sliding_window
        )
        assert torch.equal(alone[:, 0], together[:, token])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("position", [0, 40, CHUNK - 1, CHUNK])
def test_slots_after_the_last_position_are_not_looked_at(dtype: torch.dtype, position: int) -> None:
    q, cache, input_pos = make_call(dtype, start=position)
    before = attend_by_kernel(q, cache, input_pos)
    garbage = 127 if dtype == INT8 else torch.nan
    for values in (cache.k, cache.v):
        values[:, :, position + 1 :] = garbage
    for scales in (cache.k_scales, cache.v_scales):
        if scales is not None:
            scales[:, :, position + 1 :] = torch.nan
    assert torch.equal(attend_by_kernel(q, cache, input_pos), before)


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


def test_weights_are_exact_to_the_last_bits_of_float32() -> None:
    """Two slots: the weight of the second, over scores from far below the first's to equal ones."""
    scores = torch.linspace(-80, 0, 4001, dtype=torch.float64)
    k = torch.zeros(1, len(scores), 2, 2)
    k[0, :, 1, 0] = scores.float()
    v = torch.zeros_like(k)
    v[..., 1, 0] = 1
    q = torch.ones(1, 1, len(scores), 2)
    actual = attend_by_kernel(q, Cache(k, v), torch.tensor([1])).view(-1, 2)[:, 0]
    logits = k[0, :, 1, 0].double() / 2**0.5
    # A score of 80 is itself rounded to 4e-6.
    torch.testing.assert_close(actual.double(), logits.sigmoid(), rtol=1e-5, atol=0)
    near = logits > -1
    torch.testing.assert_close(actual[near].double(), logits[near].sigmoid(), rtol=3e-7, atol=0)


def test_a_query_that_is_not_a_number_gives_no_number() -> None:
    q, cache, input_pos = make_call(FLOAT, start=10)
    q[0, 0, 3, 5] = torch.nan
    actual = attend_by_kernel(q, cache, input_pos).view(8, 64)
    assert actual[3].isnan().all()
    assert actual[[0, 1, 2, 4, 5, 6, 7]].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_operator_keeps_what_torch_asks_of_one(dtype: torch.dtype) -> None:
    q, cache, input_pos = make_call(dtype, start=5, tokens=2)
    arguments = (q, cache.k, cache.v, cache.k_scales, cache.v_scales, input_pos, 4)
    torch.library.opcheck(torch.ops.gptfast.attention.default, arguments)


def test_what_does_not_fit_is_refused() -> None:
    q, cache, pos = make_call(FLOAT, start=5, tokens=2)
    k, v = cache.k, cache.v
    codes, scales = k.to(INT8), torch.ones(1, 2, k.shape[2], 1)
    refused: list[tuple[str, tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor, int | None]]] = [
        ("queries must be", (q[0], k, v, None, None, pos, None)),
        ("queries must be", (q.double(), k, v, None, None, pos, None)),
        ("queries must be", (q.transpose(1, 2), k, v, None, None, pos, None)),
        ("queries must be", (q[:0], k, v, None, None, pos, None)),
        ("alike", (q, k, v.bfloat16(), None, None, pos, None)),
        ("alike", (q, k, v[:, :, 1:], None, None, pos, None)),
        ("alike", (q, k[:, :, ::2], v[:, :, ::2], None, None, pos, None)),
        ("float32, bfloat16 or int8", (q, k.half(), v.half(), None, None, pos, None)),
        ("do not fit", (q.expand(2, -1, -1, -1).contiguous(), k, v, None, None, pos, None)),
        ("do not fit", (q[:, :, :7].contiguous(), k, v, None, None, pos, None)),
        ("do not fit", (q[..., :32].contiguous(), k, v, None, None, pos, None)),
        ("needs scales", (q, codes, codes, None, None, pos, None)),
        ("needs scales", (q, codes, codes, scales, None, pos, None)),
        ("needs scales", (q, k, v, scales, scales, pos, None)),
        ("scales must be", (q, codes, codes, scales, scales[:, :, 1:], pos, None)),
        ("scales must be", (q, codes, codes, scales.bfloat16(), scales, pos, None)),
        ("positions must be", (q, k, v, None, None, pos[:1], None)),
        ("positions must be", (q, k, v, None, None, pos.int(), None)),
        ("positions must ascend", (q, k, v, None, None, pos.flip(0), None)),
        ("positions must ascend", (q, k, v, None, None, pos - 6, None)),
        ("positions must ascend", (q, k, v, None, None, pos + SPARE + 1, None)),
        ("sliding window", (q, k, v, None, None, pos, 0)),
    ]
    for words, arguments in refused:
        with pytest.raises(ValueError, match=words):
            torch.ops.gptfast.attention.default(*arguments)
